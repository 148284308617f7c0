"""The networks in plain PyTorch: language model, speech tokenizer, flow, vocoders, their loading."""
