"""What does `import gemma4_compat` cost, against what it needs to import anyway?

python benchmarks/shim/import_time.py [--runs N] [--json FILE]

CPU time, each import in a fresh process, the two statements in turn so that drift hits both; the ratio is that of the
medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

STATEMENTS = {"baseline": "import importlib.metadata, packaging.specifiers", "gemma4_compat": "import gemma4_compat"}
CHILD = "import time; t = time.process_time(); {}; print(time.process_time() - t)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="processes per statement (default: 40)")
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(arguments.runs + 1):
        for name, statement in STATEMENTS.items():
            done = subprocess.run([sys.executable, "-c", CHILD.format(statement)], capture_output=True, check=True)
            seconds[name].append(float(done.stdout))
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first filled caches
    quartiles = {name: statistics.quantiles(values[1:], n=4) for name, values in seconds.items()}
    result = {
        "question": "cost of import gemma4_compat against import importlib.metadata, packaging.specifiers",
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "runs": arguments.runs,
        "median_ms": {name: round(1000 * value, 2) for name, value in medians.items()},
        "quartiles_ms": {name: [round(1000 * value, 2) for value in values] for name, values in quartiles.items()},
        "ratio": round(medians["gemma4_compat"] / medians["baseline"], 3),
    }
    for name in STATEMENTS:
        print(f"{name:<14} {result['median_ms'][name]:>7.2f} ms  (quartiles {result['quartiles_ms'][name]})")
    print(f"ratio          {result['ratio']:>7.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
