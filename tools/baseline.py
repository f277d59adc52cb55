"""What a renovation must leave as it is, as JSON: ``python -m tools.baseline OUT``, before and after, then ``diff``.

Patches with all their fields, the public names, the help of every command, plans, and, with ``--ptx``, a hash of each
example kernel's PTX, without its name (``tests/unit/kernels/kernel_examples.py``; needs NVRTC, takes minutes).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gemma4_compat
from gemma4_compat import testing

#: Function, model, and what else a plan is asked.
PLANS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("plan_device_map", "E2B", {"vram": "6GiB"}),
    ("plan_device_map", "E4B", {"vram": "8GiB", "context": 32768}),
    ("plan_device_map", "12B", {"vram": "12GiB"}),
    ("plan_device_map", "26B-A4B", {"vram": "12GiB", "batch": 2}),
    ("plan_device_map", "31B", {"vram": ["24GiB", "24GiB"]}),
    ("plan_training", "E2B", {"vram": "8GiB"}),
    ("plan_training", "E4B", {"vram": "12GiB", "max_length": 4096, "optim": "paged_adamw_8bit"}),
)
#: PTX is a matter of the architecture's generation: before tensor cores had bfloat16, with it, and with programmatic
#: dependent launch.
ARCHITECTURES = ("compute_75", "compute_80", "compute_90")


def plain(value: Any) -> Any:
    """A value as JSON-able data; functions by their names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in sorted(value.items())}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return value


def patches() -> dict[str, Any]:
    """Every patch by its id."""
    return {patch.id: plain(patch) for patch in gemma4_compat.patches()}


def helps() -> dict[str, list[str]]:
    """What ``--help`` of each command prints."""
    import typer
    from typer.testing import CliRunner

    from gemma4_compat import cli

    commands = sorted(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
    run = CliRunner()
    return {
        name: run.invoke(cli.app, [name, "--help"], env={"COLUMNS": "120"}).output.splitlines() for name in commands
    }


def plans() -> dict[str, Any]:
    """What each of :data:`PLANS` answers."""
    found = {}
    for function, model, options in PLANS:
        plan: Callable[..., Any] = getattr(gemma4_compat, function)
        found[f"{function} {model} {json.dumps(options)}"] = plan(model, **options).as_data()
    return found


def unnamed(code: str, name: str) -> str:
    """PTX without the kernel's name, which its shared variables have in theirs, without its linkage (a template's is
    weak), and without parameters that it does not read.
    """
    code = re.sub(r"\b_ZZ\w*E\d+(\w+)", r"\1", code.replace(name, "kernel"))
    code = re.sub(r"\b_ZN\d+[a-z_]+\d+(\w+)E\b", r"\1", code)
    code = code.replace(".weak\tkernel", ".globl\tkernel").replace(".weak .entry", ".visible .entry")
    code = re.sub(r"\t\.param [^\n]*kernel_param_\d+,?\n", "", code)
    read = {name: number for number, name in enumerate(dict.fromkeys(re.findall(r"kernel_param_\d+", code)))}
    return re.sub(r"kernel_param_\d+", lambda found: f"param{read[found[0]]}", code)


def ptx() -> dict[str, list[str]]:
    """Hashes of the PTX of each module's examples, by module and architecture."""
    from gemma4_compat._kernels import compiling, programs
    from tests.unit.kernels.kernel_examples import EXAMPLES, FROM, nvrtc_of_a_wheel

    compiler = nvrtc_of_a_wheel()
    if compiler is None:
        sys.exit("--ptx needs NVRTC: pip install 'nvidia-cuda-nvrtc>=13'")
    found = {}
    for module, examples in EXAMPLES.items():
        for architecture in ARCHITECTURES:
            if int(architecture[-2:]) < FROM.get(module, (0, 0))[0] * 10:
                continue
            hashes = set()
            for text in {example.text for example in examples()}:
                options = compiling.options(architecture)
                code, _, (name,) = compiler.compiled(*programs.program([text]), options)
                hashes.add(hashlib.sha256(unnamed(code.decode(), name).encode()).hexdigest())
            found[f"{module} {architecture}"] = sorted(hashes)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.baseline", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ptx", action="store_true", help="hashes of kernels as well")
    options = parser.parse_args()
    data = {
        "names": {"gemma4_compat": sorted(gemma4_compat.__all__), "testing": sorted(testing.__all__)},
        "patches": patches(),
        "helps": helps(),
        "plans": plans(),
        "ptx": ptx() if options.ptx else {},
    }
    options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print({name: len(part) for name, part in data.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
