"""Checkpoint folders as an operator sees them: what is inside, conversion, quantising."""
