"""What a small model that answers questions learns from: facts, wordings, dialogues."""
