#!/usr/bin/env bash
# The GPU tests and benchmarks in one or two stacks, without a network. Writes $OUT/<stack>.json, which
# `python -m tools.evidence FILE ...` puts into docs/evidence, and $OUT/benchmarks/<stack>/.
# usage: gpu/run.sh WHEELS [PYTEST ARGUMENTS...]   WHEELS holds one folder of wheels a stack: WHEELS/newest, WHEELS/thread
# The machine needs torch with CUDA, pytest, typer and what transformers needs beside these wheels. Wheels in WHEELS/tools
# go with every stack; with pytest-xdist among them (or installed) tiny models take WORKERS processes (8), since most of
# their time is Python's. More wait for each other: of two stacks with 15 each on two H100s no test ended in eight minutes.
# PARTS="tiny several" runs some of the parts: matrix (the thread's), small (a filled card), tiny (tiny models),
# several (two GPUs), benchmarks (BENCHMARKS="SCRIPT:SHAPE:MINUTES ..."). Each GPU takes the next part as soon as it is
# free. A result that is already there keeps what other parts measured.
set -u
wheels=$1; shift
out=${OUT:-$(mktemp -d)}; mkdir -p "$out"; logs=${LOGS:-$(mktemp -d)}; mkdir -p "$logs"; logs=$(cd "$logs" && pwd)
matrix="tests/world/gpu/test_thread.py"  # it and "small" fill the card: nothing else may be on it; two GPUs halve its time
small="tests/world/gpu/test_small_card.py"
several="tests/world/gpu/test_two_gpus.py tests/world/gpu/test_tuners.py"
tiny=$(ls tests/world/gpu/test_*.py | grep -vxF "$(printf '%s\n' $matrix $small $several)" | tr '\n' ' ')
gpus=$(nvidia-smi -L | wc -l)
[ "$gpus" -gt 0 ] || { echo "gpu/run.sh: nvidia-smi lists no GPU" >&2; exit 2; }
parts=${PARTS:-matrix small tiny several benchmarks}
benchmarks=${BENCHMARKS:-adapter_load:E2B:1.5 idle_shim:E2B:1.5}
# Checkpoints of 10 GB go where they are read fastest.
room=$(df --output=avail -k /dev/shm 2> /dev/null | tail -n 1)
[ "${room:-0}" -gt $((64 << 20)) ] && export TMPDIR=${TMPDIR:-/dev/shm}

tests() {  # STACK NAME FILES...
  local stack=$1 name=$2 threads=8 together=() failed=0 room; room=$(mktemp -d); shift 2
  [[ $name = tiny || $name = several ]] && threads=2 && python3 -c "import xdist" 2> /dev/null &&
    together=(-n "${WORKERS:-8}" --dist loadgroup)
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads} GEMMA4_COMPAT_GPU_RESULTS="$logs/$stack-$name.json" \
    python3 -m pytest "$@" "${together[@]}" -q -rf -p no:cacheprovider --basetemp "$room/pytest" \
    -W "ignore:several releases of:gemma4_compat.Gemma4CompatWarning" || failed=1
  rm -rf "$room"  # checkpoints of 10 GB
  return $failed
}

measure() {  # STACK
  local benchmark script shape minutes failed=0 to="$out/benchmarks/$1"
  mkdir -p "$to"
  for benchmark in $benchmarks; do
    IFS=: read -r script shape minutes <<< "$benchmark"
    python3 benchmarks/*/"$script.py" --shape "$shape" --minutes "$minutes" --out "$to/$script-$shape.json" || failed=1
  done
  return $failed
}

part() {  # STACK NAME [PYTEST ARGUMENTS...]
  local stack=$1 name=$2 command verdict="" started=$SECONDS; shift 2
  if [ "$name" = benchmarks ]; then command=(measure "$stack"); else command=(tests "$stack" "$name" ${!name} "$@"); fi
  "${command[@]}" < /dev/null > "$logs/$stack-$name.log" 2>&1 || verdict=", failed"
  [ -z "$verdict" ] || echo "$stack $name" >> "$logs/failed"
  echo $((SECONDS - started)) > "$logs/$stack-$name.seconds"
  echo "== $stack, $name, $(cat "$logs/$stack-$name.seconds") s$verdict"
  grep -E "^(FAILED|ERROR|PROBLEM)|(passed|failed|skipped|error).* in " "$logs/$stack-$name.log"
}

drain() {  # QUEUE GPUS [PYTEST ARGUMENTS...]: of the parts in the file QUEUE those that nobody else has taken, in turn
  local queue=$1 devices=$2 stack name; shift 2
  while read -r stack name; do
    mkdir "$logs/$stack-$name.taken" 2> /dev/null || continue
    CUDA_VISIBLE_DEVICES=$devices PYTHONPATH="$(cat "$logs/$stack.site"):$PWD" part "$stack" "$name" "$@"
  done < "$queue"
}

join() {  # what the parts have measured so far, into the result of each stack
  for stack in "${stacks[@]}"; do
    python3 - "$out/$stack.json" "$logs/$stack" "$gpus" <<'P'
import json, pathlib, re, sys
file, logs, gpus = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
found = [json.loads(part.read_text()) for part in sorted(logs.parent.glob(f"{logs.name}-*.json"))]
known = json.loads(file.read_text()) if file.exists() else {}
result = known | (found[0] if found else {})
for key in ("measured", "parts"):
    result[key] = dict(known.get(key, {}))
for part in found:
    result["measured"] |= part["measured"]
for seconds in sorted(logs.parent.glob(f"{logs.name}-*.seconds")):
    said = seconds.with_suffix(".log").read_text(errors="replace")
    result["parts"][seconds.stem.removeprefix(f"{logs.name}-")] = {
        "seconds": int(seconds.read_text()),
        "gpus": gpus,
        "said": re.findall(r"^=*\s?(\d+ (?:passed|failed|skipped|error).*?) in ", said, re.M)[-1:],
        "failed": re.findall(r"^(?:FAILED|ERROR|PROBLEM) (.*)", said, re.M),
    }
file.write_text(json.dumps(result, indent=1) + "\n")
P
  done
}

stacks=()
for folder in "$wheels"/*/; do
  stack=$(basename "$folder")
  [ "$stack" = tools ] && continue
  stacks+=("$stack"); mktemp -d > "$logs/$stack.site"
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$(cat "$logs/$stack.site")" \
    "$folder"*.whl $(ls "$wheels"/tools/*.whl 2> /dev/null) || exit 2
done
trap join EXIT; trap 'exit 124' TERM INT  # a run that is cut off keeps what it has
: > "$logs/one.queue"; : > "$logs/pair.queue"
for name in matrix small tiny benchmarks several; do
  [[ " $parts " == *" $name "* ]] || continue
  for stack in "${stacks[@]}"; do echo "$stack $name" >> "$logs/$([[ $name = several || $name = matrix ]] && echo pair || echo one).queue"; done
done
for ((gpu = 0; gpu < gpus; gpu++)); do drain "$logs/one.queue" $gpu "$@" & done
wait
for ((gpu = 0; gpu < gpus; gpu += 2)); do
  [ $((gpu + 1)) -lt "$gpus" ] || [ "$gpus" -eq 1 ] && drain "$logs/pair.queue" "$gpu,$((gpu + 1))" "$@" &
done
wait
echo "results: $out; logs: $logs"
[ ! -e "$logs/failed" ]
