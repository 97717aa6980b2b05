"""Data and pure functions; imports torch and nothing else."""
