"""The networks in plain PyTorch, and how their weights are read: the truth of all fast paths."""
