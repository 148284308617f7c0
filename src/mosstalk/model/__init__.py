"""The two-headed language model: network, checkpoint, sampling, generation, in plain torch."""
