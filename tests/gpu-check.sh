#!/usr/bin/env bash
# The whole check on a machine with an NVIDIA GPU, in one call: goldens in three precisions,
# the GPU tests, and a spoken answer. Needs mosstalk and its dev extra installed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu-parts.sh"

"$PYTHON" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
for dtype in float32 bfloat16 float16; do
    mosstalk verify tests/goldens/* --device cuda --dtype "$dtype" |
        grep -E 'OUT OF BOUNDS|cases,|cannot be read'
done
mosstalk verify tests/goldens/lm-* --device cuda --path fast | tail -2
"$PYTHON" -m pytest -q -m gpu tests
mosstalk chat --speech assets/question.flac --out /tmp/answer.wav --device cuda --force --stats
