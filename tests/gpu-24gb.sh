#!/usr/bin/env bash
# The whole pipeline at full size on a GPU of which 23.5 GiB are free: bf16, then FP8. Random weights
# drawn on the device, codec included, one conversation of 8,192 rows, one spoken turn; prints peaks,
# commit to first audio and the real-time factor.
# The cap is no setting of a program's: another process holds all other memory of the card, so the
# driver itself has no more to give to the context, to graphs, to libraries or to tensors.
# Needs mosstalk installed, and a GPU that nobody else uses.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu-parts.sh"
# In bf16 it fits only with the text embeddings in the host's memory.
"$PYTHON" tests/gpu_24gb.py --precision bf16 --embeddings host --json "$OUT/24gb-bf16.json"
"$PYTHON" tests/gpu_24gb.py --precision fp8 --json "$OUT/24gb-fp8.json"
