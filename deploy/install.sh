#!/bin/sh
# Install mosstalk on bare Debian, into .venv of the checkout that this file is in:
#     deploy/install.sh [cpu|cuda]
# deploy/Dockerfile runs this, and so does a machine that systemd shall serve from.
set -eu
cd "$(dirname "$0")/.."

device=${1:-cpu}
packages="ca-certificates python3 python3-venv"
case $device in
cpu) cuda="" ;;
# Triton compiles what launches a kernel, on the machine that runs it.
cuda) packages="$packages gcc libc6-dev python3-dev" cuda="--cuda" ;;
*)
    echo "install.sh: \"$device\" is no kind of machine; give cpu or cuda" >&2
    exit 2
    ;;
esac

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # several words
apt-get install -y -qq --no-install-recommends $packages
rm -rf /var/lib/apt/lists/*

# What was downloaded is not kept. Modules are compiled now: whoever serves may not write here.
XDG_CACHE_HOME=$(mktemp -d)
export XDG_CACHE_HOME PYTHONDONTWRITEBYTECODE=1
# shellcheck disable=SC2086  # no word, or one
python3 scripts/bootstrap.py --extras server,vad,transcribe,webrtc $cuda
.venv/bin/python -m compileall -q src evals
rm -rf "$XDG_CACHE_HOME"
