#!/usr/bin/env bash
# The codec on a machine with an NVIDIA GPU, in one call: goldens by the fast path in three
# precisions, the GPU tests of the codec, and its figures at the published sizes.
# Needs mosstalk and its dev extra installed, and 60 GiB of the GPU's memory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"
OUT="${OUT:-/tmp}"

for dtype in float32 float16 bfloat16; do
    "$PYTHON" -m mosstalk.cli verify tests/goldens/{flow,hift,speech}* --path fast \
        --device cuda --dtype "$dtype" | grep -E 'OUT OF BOUNDS|cases,|cannot be read'
done
"$PYTHON" -m mosstalk.cli bench codec --random-weights full --replies 1,8,32,128 --hops 200 \
    --rounds 2 --streams 1,8,64 --memory 45000 --device cuda \
    --json "$OUT/codec.json" --html "$OUT/codec.html"
"$PYTHON" -m pytest -q -m gpu tests/test_codec_verify.py tests/test_live_gpu.py \
    tests/test_hift_batch_gpu.py tests/test_flow_batch_gpu.py tests/test_bigvgan_gpu.py
