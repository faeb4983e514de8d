"""Machines with a server: started, found, watched, paid for and ended."""
