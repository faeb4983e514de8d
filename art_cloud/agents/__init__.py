"""Agents that call tools, in a plain loop."""
