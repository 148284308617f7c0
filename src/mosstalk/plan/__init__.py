"""What fits into a GPU, and what it could do at best: computed from sizes, before anything runs."""
