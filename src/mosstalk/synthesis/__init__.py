"""Seeded random checkpoints in the published layout: model, codec, voice and tokenizer."""
