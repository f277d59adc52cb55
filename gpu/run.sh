#!/usr/bin/env bash
# The GPU tests in one or two stacks, without a network. Writes docs/gpu/<stack>.json (or $OUT/<stack>.json).
# usage: gpu/run.sh WHEELS [PYTEST ARGUMENTS...]   WHEELS holds one folder of wheels a stack: WHEELS/newest, WHEELS/thread
# The machine needs torch with CUDA, pytest, typer and what transformers needs beside these wheels. On one GPU everything
# runs in turn; with several, the parts below run beside each other, and what needs two GPUs comes after them.
# PARTS="tiny" runs some of them: tiny (tiny models), small (the card is filled), several (two GPUs). A result that is
# already there keeps what other parts measured. Wheels in WHEELS/tools go with every stack; with pytest-xdist among them
# (or installed) the tiny part takes WORKERS processes (8), since most of its time is Python's.
set -u
wheels=$1; shift
out=${OUT:-docs/gpu}; mkdir -p "$out"; logs=${LOGS:-$(mktemp -d)}; mkdir -p "$logs"
small="tests/gpu/test_small_card.py tests/gpu/test_thread.py"  # these fill the card, so nothing else may be on it
several="tests/gpu/test_two_gpus.py"
tiny=$(ls tests/gpu/test_*.py | grep -vxF "$(printf '%s\n' $small $several)" | tr '\n' ' ')
gpus=$(nvidia-smi -L | wc -l)
parts=${PARTS:-tiny small several}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}  # many processes at once

part() {  # STACK NAME GPUS FILES...
  local stack=$1 name=$2 visible=$3 together=(); shift 3
  [ "$name" = tiny ] && PYTHONPATH=$(cat "$logs/$stack.site") python3 -c "import xdist" 2> /dev/null &&
    together=(-n "${WORKERS:-8}" --dist loadgroup)
  CUDA_VISIBLE_DEVICES=$visible PYTHONPATH="$(cat "$logs/$stack.site"):$PWD" \
    GEMMA4_COMPAT_GPU_RESULTS="$logs/$stack-$name.json" python3 -m pytest "$@" "${together[@]}" -q -rf -p no:cacheprovider \
    -W "ignore:several releases of:gemma4_compat.Gemma4CompatWarning" > "$logs/$stack-$name.log" 2>&1 ||
    touch "$logs/failed"
  echo "== $stack, $name"; grep -E "^(FAILED|ERROR)|(passed|failed|skipped|error).* in " "$logs/$stack-$name.log"
}

stacks=()
for folder in "$wheels"/*/; do
  stack=$(basename "$folder")
  [ "$stack" = tools ] && continue
  stacks+=("$stack"); mktemp -d > "$logs/$stack.site"
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$(cat "$logs/$stack.site")" \
    "$folder"*.whl $(ls "$wheels"/tools/*.whl 2> /dev/null) || exit 2
done
# Each GPU takes every so manieth part; one takes them all.
for ((gpu = 0; gpu < gpus; gpu++)); do
  (
    index=0
    for stack in "${stacks[@]}"; do
      for name in tiny small; do
        [[ " $parts " == *" $name "* ]] || continue
        [ $((index++ % gpus)) -eq "$gpu" ] && part "$stack" "$name" "$gpu" ${!name} "$@"
      done
    done
  ) &
done
wait
[[ " $parts " == *" several "* ]] && for stack in "${stacks[@]}"; do part "$stack" several "$(seq -s, 0 $((gpus - 1)))" $several "$@"; done
for stack in "${stacks[@]}"; do
  python3 - "$out/$stack.json" "$logs/$stack"-*.json <<'P'
import json, pathlib, sys
file, *parts = map(pathlib.Path, sys.argv[1:])
known = json.loads(file.read_text())["measured"] if file.exists() else {}
found = [json.loads(part.read_text()) for part in parts]
for part in found:
    known.update(part["measured"])
file.write_text(json.dumps(found[0] | {"measured": known}, indent=1) + "\n")
P
done
echo "logs: $logs"
[ ! -e "$logs/failed" ]
