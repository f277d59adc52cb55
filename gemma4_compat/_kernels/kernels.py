"""Fused kernels on a device: compiled, checked against PyTorch's own operations, launched."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._engine.runtime.selftest import SelfTests
from gemma4_compat._kernels.compiling import CudaCompiler
from gemma4_compat._kernels.fuse import pointwise, row_kernels, writer
from gemma4_compat._kernels.fuse.pointwise import Load, Number, Value
from gemma4_compat._kernels.noted import Note, Notes
from gemma4_compat._kernels.programs import Kernel
from gemma4_compat._kernels.specs import dense, expert_rows, nf4_dequantize, nf4_exact, nf4_gemv, shifting

_Signature = tuple[Any, ...]
_TRIED = 1 << 18  # elements, in bits drawn at random
_SIXTEEN = 1 << 16  # every value of a 16-bit dtype
_MEANS = 64  # at most; of many rows, fewer
_ROWS = 1 << 12


class Compiler(Protocol):
    """Compiles kernels for one device."""

    @staticmethod
    def unsupported_reason() -> str | None:
        """Why it cannot compile; None if it can."""

    def __init__(self, device: Any) -> None: ...

    def compiled(self, texts: Sequence[str]) -> list[Callable[[Kernel], None]]:
        """For each text, none of them twice, a function that launches its kernel on the current stream."""

    def begin(self, texts: Sequence[str]) -> list[Future[Any]]:
        """Compile in the background. Returns what has to end before :meth:`compiled` is quick; nothing if it is."""

    @property
    def notes(self) -> Notes:
        """What is known of steps on this device."""


#: By device type. Tests add one for the CPU.
COMPILERS: dict[str, type[Compiler]] = {"cuda": CudaCompiler}

_lock = threading.Lock()
_log = logging.getLogger("gemma4_compat")


class StillCompiling(Exception):  # noqa: N818 (not an error: kernels will be there)
    """Kernels are being compiled in the background.

    Args:
        futures: what has to end.
    """

    def __init__(self, futures: list[Future[Any]]) -> None:
        super().__init__()
        self.futures = futures


class Kernels:
    """The kernels of one device, and which operations they may compute there.

    Args:
        device: ``torch.device`` with an index.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._compiler = COMPILERS[device.type](device)
        self._known: dict[str, Callable[[Kernel], None]] = {}
        self._same: dict[_Signature, bool] = {}
        self._untried: set[str] = set()  # texts of a note that has turned out to be wrong
        self._inexact: frozenset[str] = frozenset()  # operations, as notes name them
        self.tests = SelfTests()
        self.layouts: dict[Any, tuple[Any, ...]] = {}  # of fusing.Fusing

    def prepare(self, texts: Sequence[str], signatures: Sequence[_Signature], *, wait: bool = True) -> bool:
        """Compile and check what is new. Not inside a capture.

        Args:
            texts: of kernels.
            signatures: of the operations in them.
            wait: for the compiler, if kernels are neither in memory nor on disk.

        Returns:
            whether every operation has PyTorch's bits.

        Raises:
            StillCompiling: it would have to wait.
        """
        trials = {key: self._trial(key) for key in signatures if key not in self._same and _is_computed(key)}
        self._compile([*texts, *(kernel.text for tried, _, _ in trials.values() for kernel in tried)], wait=wait)
        for key, (tried, found, expected) in trials.items():
            for kernel in tried:
                self.launch(kernel)
            self._same[key] = same_bits(found, expected)
        self._untried.difference_update(texts)
        return all(self.accepts(key) for key in signatures)

    def selftest(self, key: Any, what: str, instead: str, has_same_bits: Callable[[], bool]) -> bool:
        """Whether kernels may compute something here. They are tried once; one line says so if they may not.

        Args:
            key: of the trial.
            what: they compute.
            instead: who computes it if they may not.
            has_same_bits: compiles and tries them. It is not called where nothing can be compiled.
        """
        import torch

        def trial() -> bool:
            try:
                why = COMPILERS[self._device.type].unsupported_reason()
                if why is None and not has_same_bits():
                    why = f"{what} differs bitwise on {self._device}"
            except torch.OutOfMemoryError:
                raise
            except (OSError, RuntimeError) as error:
                why = f"this package's kernels failed: {' '.join(str(error).split()):.200}"
            if why is not None:
                _log.info("gemma4_compat: %s: %s", instead, why)
            return why is None

        try:
            return self.tests.passes(key, self._device, trial)
        except torch.OutOfMemoryError:
            return False  # only this time

    def accepts(self, signature: _Signature) -> bool:
        """Whether every trial was bitwise equal to PyTorch, here or in the process that has left a note."""
        found = self._same.get(signature)
        return found if found is not None else not self._inexact or repr(signature) not in self._inexact

    def is_prepared(self, text: str) -> bool:
        """Whether a kernel with this text can be launched."""
        return text in self._known and text not in self._untried

    def recall(self, shapes: str, kind: str) -> bool:
        """Prepare what steps of such a model needed. Not inside a capture.

        Args:
            shapes: of :func:`noted.shapes_of`.
            kind: of a step.

        Returns:
            whether steps of this kind were fused, here or in an earlier process, and their kernels are prepared.
        """
        note = self._compiler.notes.of(shapes)
        if kind not in note.kinds:
            return False
        try:
            self._compile(note.texts, wait=False)
        except StillCompiling:  # they are not on disk any more
            return False
        self._inexact |= set(note.inexact)
        return True

    def note(self, shapes: str, kind: str, texts: Sequence[str]) -> None:
        """Keep for later what a fused step launched, and which operations are inexact here."""
        notes = self._compiler.notes
        inexact = {repr(signature) for signature, same in self._same.items() if not same} | self._inexact
        notes.keep(shapes, notes.of(shapes).with_more(texts, kind, inexact))

    def forget(self, shapes: str) -> None:
        """A note was wrong: all that it names is tried again."""
        notes = self._compiler.notes
        self._untried.update(notes.of(shapes).texts)
        self._inexact = frozenset()
        notes.keep(shapes, Note())

    def inexact(self) -> list[str]:
        """The operations whose trials did, as text."""
        return sorted({f"{key[0]} of {key[2]}" for key, same in self._same.items() if not same})

    def launch(self, kernel: Kernel) -> None:
        """Launch a prepared kernel on the current stream.

        Raises:
            KeyError: the kernel is not prepared.
        """
        self._known[kernel.text](kernel)

    def again(self, kernel: Kernel) -> Callable[[int], None] | None:
        """A function that launches a prepared kernel with another address of its last tensor, which is cheaper than
        :meth:`launch`; None if the compiler has no such function.
        """
        again = getattr(self._known[kernel.text], "again", None)
        return None if again is None else again(kernel)

    def _compile(self, texts: Sequence[str], *, wait: bool = True) -> None:
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            futures = [] if wait else self._compiler.begin(new)
            if not all(future.done() for future in futures):
                raise StillCompiling(futures)
            self._known.update(zip(new, self._compiler.compiled(new), strict=True))

    def _trial(self, signature: _Signature) -> tuple[list[Kernel], Any, Any]:
        """Kernels with only this operation, the memory of their results, and PyTorch's results: for every 16-bit
        value, or for many operands.
        """
        import torch

        for module in (nf4_dequantize, expert_rows, nf4_exact, shifting):
            if signature[0] == module.OPERATION:
                kernel, found, expected = module.trial(signature, self._device)
                return [kernel], found, expected
        name, kinds, dtype = signature
        if name in pointwise.OF_ROWS:
            return self._trial_of_rows(name, *kinds)
        generator = torch.Generator(self._device).manual_seed(0)
        tensors = [kind for kind in kinds if not isinstance(kind, float)]
        elements = _SIXTEEN if len(tensors) == 1 and tensors[0].itemsize == 2 else _TRIED
        given: list[Any] = [
            kind if isinstance(kind, float) else _any_bits(kind, elements, generator) for kind in kinds
        ]
        operands = tuple(Number(one) if isinstance(one, float) else Load(one, (1,)) for one in given)
        reference = pointwise.operations()[name].reference
        expected = given[0].to(dtype) if reference is None else reference(*given)
        value = Value(name, operands, (elements,), dtype, memory=torch.empty_like(expected))
        return [writer.kernel_of([value])], value.memory, expected

    def _trial_of_rows(self, name: str, rows: int, columns: int) -> tuple[list[Kernel], Any, Any]:
        """One row may have the right bits by chance: so many that it does not."""
        import torch

        generator = torch.Generator(self._device).manual_seed(0)
        count = min(_MEANS, max(1, _ROWS // rows))
        given = torch.randn((count, rows, columns), generator=generator, device=self._device)
        reference = pointwise.operations()[name].reference
        assert reference is not None
        expected = torch.stack([reference(one) for one in given])
        found = torch.empty_like(expected)
        kernels = []
        for one, memory in zip(given, found, strict=True):
            operands = (Load(one, (columns, 1)),)
            value = Value(name, operands, (rows, 1), given.dtype, columns=columns, memory=memory)
            kernels += row_kernels.kernels_of([value])
        return kernels, found, expected


def _is_computed(signature: _Signature) -> bool:
    """Whether an operation computes what PyTorch does: some only move data, others have custom numerics."""
    others = "concatenate", "constant", pointwise.DOT, dense.OPERATION, nf4_gemv.OPERATION
    return signature[0] not in others


def _any_bits(dtype: Any, elements: int, generator: Any) -> Any:
    """Numbers with any bits, including zeros, infinities and NaN."""
    import torch

    device = generator.device
    if elements == _SIXTEEN and dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    bits = torch.randint(-(2**31), 2**31 - 1, (elements,), generator=generator, device=device)
    if dtype == torch.bool:
        return bits > 0
    return bits.to(torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)


_kernels: dict[Any, Kernels] = {}


def of(device: Any) -> Kernels:
    """The kernels of this device."""
    with _lock:
        if device not in _kernels:
            _kernels[device] = Kernels(device)
        return _kernels[device]
