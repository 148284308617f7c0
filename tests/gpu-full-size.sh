#!/usr/bin/env bash
# Full-size random weights on a GPU, in one call: written, inspected, converted, read back and run
# for a scripted spoken reply. Needs 45 GiB of disk under WORK and mosstalk installed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/gpu-parts.sh"
WORK="${WORK:-/tmp/mosstalk-full-size}"
answer() {
    mosstalk chat --model "$1/model" --codec "$1/codec" --speech assets/question.flac \
        --script speech:75 --device cuda --out "$WORK/answer.wav" --force --stats
}

mkdir -p "$WORK"
time mosstalk checkpoint synthesize "$WORK/full" --size full
time mosstalk checkpoint inspect "$WORK/full"
time mosstalk checkpoint convert "$WORK/full" "$WORK/converted" --dtype bf16
mosstalk checkpoint inspect "$WORK/converted" --no-hashes
"$PYTHON" tests/gpu_full_size.py "$WORK/full" "$WORK/converted"
time mosstalk voice create ada assets/librivox.flac --codec "$WORK/converted/codec"
answer "$WORK/full"
time answer "$WORK/converted"
