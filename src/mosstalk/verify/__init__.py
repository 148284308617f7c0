"""Golden cases: what other implementations computed, against what this one computes."""
