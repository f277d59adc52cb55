"""Texts with errors, for ``gemma4-compat explain``: real ones, cut, joined and mixed with anything."""

from __future__ import annotations

from hypothesis import strategies as st

from gemma4_compat.patches.registry import RAISED
from tests.generated.fuzz import values
from tests.generated.fuzz.case import Case

_KNOWN = sorted({text for texts in RAISED.values() for text in texts})
_FRAMES = (
    "Traceback (most recent call last):",
    '  File "/x/site-packages/accelerate/hooks.py", line 175, in new_forward',
    '  File "C:\\x\\transformers\\models\\gemma4\\modeling_gemma4.py", line 1, in forward',
    "hooks.py:175: in new_forward",
    "[rank0]: KeyError: 3",
    "E       RuntimeError: x",
    "\x1b[31mValueError\x1b[0m: x",
    "During handling of the above exception, another exception occurred:",
)
_HUGE = (
    *("A" * 300_000, "AError: " * 40_000, "A.a" * 100_000 + "Error: x", "KeyError: " + "1 " * 200_000, "'" * 100_000),
    *(
        "File " * 60_000 + ".py",
        'File "' + ".py" * 90_000,
        "\n" * 300_000,
        "KeyError: 3\n" * 30_000,
        "[rank0]: " * 9999,
    ),
    *("a_b " * 70_000, "RuntimeError: " + "tensor meta device " * 20_000, "\x1b[" + "1;" * 100_000, "E   " * 90_000),
)
_line = st.sampled_from([*_KNOWN, *_FRAMES]) | values.text
_cut = st.builds(lambda line, end: line[:end], _line, st.integers(0, 80))
text = st.lists(_line | _cut, max_size=8).map("\n".join) | _line | st.sampled_from(_HUGE)
cases: st.SearchStrategy[Case] = st.builds(lambda text: Case({}, {"text": text}), text)
