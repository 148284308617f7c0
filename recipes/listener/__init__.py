"""A speech tokenizer that begins as Whisper tiny.en's encoder: recipe and probe."""
