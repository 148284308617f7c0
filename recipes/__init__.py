"""Training recipes; not part of the installed package."""
