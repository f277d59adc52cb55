"""Run the patch tests in every stack of tests/matrix.toml and write what was measured to docs/evidence.

python -m tools.matrix run                     every stack
python -m tools.matrix run newest bnb-0.49.0   some stacks
python -m tools.matrix run --patches PATCH     one patch in every stack, beside what is known of the others
python -m tools.matrix run --ci                the stacks of CI, in each the patches that have a gate there
python -m tools.matrix beside                  the shim beside unsloth, axolotl, Liger-Kernel and others, both orders
python -m tools.matrix canary                  the newest of everything, pre-releases included; reports, never fails
python -m tools.matrix bisect PATCH LIBRARY    where a library's affected releases begin and end, and what to write
python -m tools.matrix releases                the releases the index holds, as matrix.toml writes them

`nox -s matrix`, `nox -s canary` and `nox -s bisect` call this in an environment with torch. A stack borrows that
environment's torch and gets everything else of its own, so it costs seconds and no download of torch.
"""


class UsageError(Exception):
    """The command cannot be run as it was given; the message is one line."""
