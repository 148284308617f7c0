#!/usr/bin/env bash
# The codec on a machine with an NVIDIA GPU, in one call: goldens by the fast path in three
# precisions, the GPU tests of the codec, and its figures at the published sizes. Runs all of it
# whatever fails, says what did, and exits 1 then.
# Needs mosstalk and its dev extra installed, and 60 GiB of the GPU's memory.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu-parts.sh"

goldens() { # in one precision; prints what matters
    mosstalk verify tests/goldens/{flow,hift,speech}* --path fast \
        --device cuda --dtype "$1" > "$OUT/goldens-$1.txt" 2>&1
    local status=$?
    grep -E 'OUT OF BOUNDS|cases?,|cannot be read|error' "$OUT/goldens-$1.txt"
    return "$status"
}

for dtype in float32 float16 bfloat16; do
    part "goldens in $dtype" goldens "$dtype"
done
part "GPU tests" "$PYTHON" -m pytest -q -m gpu tests/test_codec_verify.py tests/test_live_gpu.py \
    tests/test_hift_batch_gpu.py tests/test_flow_batch_gpu.py tests/test_speech_decoder_gpu.py \
    tests/test_bigvgan_gpu.py
part "figures" mosstalk bench codec --random-weights full --replies 1,8,32,128 \
    --hops 200 --rounds 2 --streams 1,8,64 --memory 45000 --device cuda \
    --json "$OUT/codec.json" --html "$OUT/codec.html"

finish
