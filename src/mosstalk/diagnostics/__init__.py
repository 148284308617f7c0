"""What a machine has, what a turn took, and what helps to find a fault."""
