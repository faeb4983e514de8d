"""Clouds, Kubernetes and Slurm, by SkyPilot."""
