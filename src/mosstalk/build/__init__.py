"""From two checkpoints to one folder that starts at once: converted, compiled, checked, planned."""
