"""Many conversations in one batch: requests, KV blocks and scheduling (no torch), steps (torch)."""
