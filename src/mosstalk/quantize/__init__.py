"""Quantising a checkpoint: calibrating its inputs, measuring what it costs, writing it."""
