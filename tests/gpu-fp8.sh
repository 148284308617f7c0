#!/usr/bin/env bash
# FP8 and built folders on a machine with an NVIDIA GPU that has FP8, in one call: claims, steps and
# prompts at the published sizes, GPU tests, then a folder built, tuned and started twice. Needs
# mosstalk and its dev extra installed, 80 GiB of the GPU's memory, and 45 GiB of disk under WORK.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu-parts.sh"
WORK="${WORK:-/tmp/mosstalk-fp8}"
SIZE="${SIZE:-full}"

mkdir -p "$WORK"
rm -rf "$WORK/engine"
part "steps" mosstalk bench step --random-weights "$SIZE" --precision fp8 --at 1x512,64x1000 \
    --errors 256 --json "$OUT/step-fp8.json"
part "prompts" mosstalk bench step --prefill --random-weights "$SIZE" --precision fp8 --rows 512,6+1000 \
    --json "$OUT/prefill-fp8.json"
part "layers alone" "$PYTHON" tests/gpu_lm_step.py --fp8
part "a folder" mosstalk build --random-weights "$SIZE" "$WORK/engine" --precision fp8 \
    --max-sessions 1 --max-rows 8192
part "what is in it" mosstalk checkpoint inspect "$WORK/engine"
part "two starts" mosstalk bench start "$WORK/engine" --json "$OUT/start-fp8.json"
part "steps, tuned" mosstalk bench step --model "$WORK/engine" --at 1x512,64x1000 \
    --json "$OUT/step-fp8-tuned.json"
part "claims" "$PYTHON" -m pytest -q tests/lm_fp8_claims.py
part "GPU tests" "$PYTHON" -m pytest -q -m gpu tests/test_engine_fp8.py \
    tests/test_quantize_products.py tests/test_build_gpu.py tests/test_host_table.py
cp "$WORK/engine/tiles.json" "$WORK/engine/engine.json" "$OUT"
rm -rf "$WORK"
finish
