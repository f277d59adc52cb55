#!/usr/bin/env bash
# The GPU tests in one or two stacks, without a network. Writes docs/gpu/<stack>.json (or $OUT/<stack>.json).
# usage: gpu/run.sh WHEELS [PYTEST ARGUMENTS...]   WHEELS holds one folder of wheels a stack: WHEELS/newest, WHEELS/thread
# The machine needs torch with CUDA, pytest, typer and what transformers needs beside these wheels.
set -u
wheels=$1; shift
out=${OUT:-docs/gpu}; mkdir -p "$out"
status=0
for folder in "$wheels"/*/; do
  stack=$(basename "$folder"); site=$(mktemp -d)
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$folder"*.whl || exit 2
  echo "== $stack"
  PYTHONPATH="$site:$PWD" GEMMA4_COMPAT_GPU_RESULTS="$out/$stack.json" \
    python3 -m pytest tests/gpu -q -p no:cacheprovider \
    -W "ignore:several releases of:gemma4_compat.Gemma4CompatWarning" "$@" || status=1
done
exit $status
