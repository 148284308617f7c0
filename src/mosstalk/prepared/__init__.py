"""Folders that start at once, and the models that a command uses by default."""
