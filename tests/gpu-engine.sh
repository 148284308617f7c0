#!/usr/bin/env bash
# The engine on a machine with an NVIDIA GPU, in one call: its GPU tests and golden rows, then its
# figures at the published sizes, alone and beside other means. Needs mosstalk and its dev extra
# installed, transformers for its baseline, and 100 GiB of the GPU's memory.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu-parts.sh"
bench() { mosstalk bench "$@"; }

part "steps" bench step --random-weights full --at 1x512,64x1000 --errors 256 \
    --json "$OUT/step.json" --html "$OUT/step.html"
part "prompts" bench step --prefill --random-weights full --rows 512,6+1000 --json "$OUT/prefill.json"
part "steps by other means" bench step --random-weights full --at 1x512,64x1000 \
    --baseline graph --baseline transformers --json "$OUT/step-beside.json"
part "prompts by other means" bench step --prefill --random-weights full --rows 512,6+1000 \
    --baseline graph --baseline transformers --json "$OUT/prefill-beside.json"
part "steps, batch-invariant" bench step --random-weights full --at 1x512,64x1000 \
    --batch-invariant --json "$OUT/step-invariant.json"
part "layers alone" "$PYTHON" tests/gpu_lm_step.py
part "golden rows" mosstalk verify tests/goldens/lm-* --path fast --device cuda
part "GPU tests" "$PYTHON" -m pytest -q -m gpu tests/test_engine_*.py tests/test_lm_*.py
part "steps, compiled" bench step --random-weights full --at 1x512 --baseline compile
finish
