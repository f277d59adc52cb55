"""The CUDA C that kernels of several weights share: parameters, and which of the weights a block belongs to."""

from __future__ import annotations

from collections.abc import Sequence


def parameters(given: str, names: Sequence[tuple[str, str]], result: str, weights: int) -> list[str]:
    """What a kernel is given: the input, what belongs to each weight, the results, and sizes of each.

    Args:
        given: the input's declaration.
        names: C types and names of what belongs to a weight, without its number.
        result: C type of the results.
        weights: how many.
    """
    found = [given]
    for number in range(weights):
        found += [f"{c} __restrict__ {name}{number}" for c, name in names]
    found += [f"{result}* __restrict__ output{number}" for number in range(weights)]
    for number in range(weights):
        found += [f"unsigned int outputs{number}", f"unsigned int blocks{number}"]
    return found


def choice(names: Sequence[tuple[str, str]], weights: int) -> list[str]:
    """Lines that set ``block``, ``outputs``, ``output`` and these names, which are the first weight's until then."""
    lines = []
    for number in range(1, weights):
        before = " + ".join(f"blocks{other}" for other in range(number))
        chosen = "".join(f"{name} = {name}{number}; " for _, name in names)
        lines.append(
            f"if (blockIdx.x >= {before}) {{ block = blockIdx.x - ({before}); outputs = outputs{number}; "
            f"output = output{number}; {chosen}}}"
        )
    return lines


def text(name, body, options, given, names, result, weights):
    own = []
    for n in range(weights):
        fields = [f"{field}{n}" for _, field in names]
        if "bias" not in dict(map(reversed, names)):
            fields.append("nullptr")
        own.append(f"{{{', '.join(fields)}, output{n}, outputs{n}, blocks{n}}}")
    template = ", ".join(str(o).lower() if isinstance(o, bool) else str(o) for o in options)
    kind = options[0]
    return (
        f'#include "{body.partition("::")[0]}.cuh"\n' f'extern "C" __global__ void {name}({", ".join(parameters(given, names, result, weights))}) {{\n'
        f"  const {body.partition('::')[0]}::Weight<{kind}> weights[] = {{{', '.join(own)}}};\n"
        f"  {body}<{template}>(blockIdx.x, input, weights);\n}}\n"
    )
