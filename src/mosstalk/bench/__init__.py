"""Every number that the project publishes, as a command."""
