"""Advance torch's CPU random numbers without drawing them: jump ahead in the Mersenne Twister.

A step is linear in the bits of the state, so n steps are a polynomial of one step: x**n modulo the characteristic
polynomial (Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer: Efficient jump ahead for F2-linear random number
generators, 2008). Polynomials over GF(2) are integers here; bit i is the coefficient of x**i.
"""

from __future__ import annotations

import functools
from typing import Any

_WORDS, _MIDDLE, _BITS, _LOWER = 624, 397, 32, 31
_TWIST = 0x9908B0DF
_DEGREE = _WORDS * _BITS - _LOWER
#: Layout of torch's state: how many numbers are left, the index of the next one, and the words (64 bits each).
_LEFT, _NEXT, _STATE, _SIZE = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _WORDS), 5056
#: From this many numbers on, a jump costs less than drawing them.
_WORTH_IT = 8_000_000
_CHUNK = 1 << 22
_EVEN = bytes(sum((byte >> bit & 1) << 2 * bit for bit in range(4)) for byte in range(256))
_ODD = bytes(sum((byte >> bit + 4 & 1) << 2 * bit for bit in range(4)) for byte in range(256))


def advance(numbers: int) -> None:
    """Advance torch's CPU generator as if this many 32-bit numbers had been drawn."""
    import torch

    if numbers >= _WORTH_IT:
        torch.set_rng_state(after(torch.get_rng_state(), numbers))
        return
    while numbers > 0:
        drawn = min(numbers, _CHUNK)
        torch.empty(drawn, dtype=torch.uint8, device="cpu").random_()  # one number each
        numbers -= drawn


def after(state: Any, numbers: int) -> Any:
    """``state``, as from ``torch.get_rng_state()``, after this many 32-bit numbers.

    Raises:
        ValueError: it is not a state of the CPU's generator.
    """
    import numpy

    if len(state) != _SIZE:
        raise ValueError(f"expected the state of torch's CPU generator ({_SIZE} bytes), got {len(state)} bytes")
    result = state.clone()
    raw = result.numpy()
    used = _WORDS + 1 - int(raw[_LEFT].view(numpy.uint32)[0]) + numbers
    renewed = (used - 1) // _WORDS
    used -= _WORDS * renewed
    if renewed:
        words = raw[_STATE].view(numpy.uint64).astype(numpy.uint32)
        raw[_STATE] = _jumped(words, renewed).astype(numpy.uint64).view(numpy.uint8)
    if numbers:
        raw[_LEFT] = numpy.array([_WORDS + 1 - used], numpy.uint32).view(numpy.uint8)
        raw[_NEXT] = numpy.array([used], numpy.uint64).view(numpy.uint8)
    return result


def _jumped(words: Any, renewed: int) -> Any:
    """The words after all of them were renewed this many times."""
    import numpy

    # One step less, on the sequence without its first word: 31 bits of that word do not belong to the state.
    polynomial = _power(_WORDS * renewed - 1)
    sequence = _continued(words, 1 + _DEGREE + _WORDS)[1:]
    bits = numpy.frombuffer(polynomial.to_bytes(_DEGREE // 8 + 1, "little"), numpy.uint8)
    chosen = numpy.flatnonzero(numpy.unpackbits(bits, bitorder="little"))
    windows = numpy.lib.stride_tricks.sliding_window_view(sequence, _WORDS)
    return numpy.bitwise_xor.reduce(windows[chosen], axis=0)


def _continued(words: Any, length: int) -> Any:
    """The sequence that begins with these words."""
    import numpy

    generator, found = numpy.random.MT19937(), [words]
    generator.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": _WORDS}}
    for _ in range(length // _WORDS):
        generator.random_raw(_WORDS, output=False)  # as many as it has, so it renews them
        found.append(generator.state["state"]["key"])
    return numpy.concatenate(found)[:length]


@functools.lru_cache(maxsize=16)
def _power(exponent: int) -> int:
    """x**exponent modulo the characteristic polynomial."""
    digits = f"{exponent:b}"
    start = _DEGREE.bit_length() - 1  # powers up to this many binary digits need no reduction
    found = 1 << int(digits[:start], 2)
    for digit in digits[start:]:
        size = found.bit_length() // 8 + 1
        spread = bytearray(2 * size)
        raw = found.to_bytes(size, "little")
        spread[0::2], spread[1::2] = raw.translate(_EVEN), raw.translate(_ODD)
        found = int.from_bytes(spread, "little") << int(digit)  # squared
        while high := found >> _DEGREE:
            found &= (1 << _DEGREE) - 1
            for term in _terms():
                found ^= high << term
    return found


@functools.lru_cache(maxsize=1)
def _terms() -> tuple[int, ...]:
    """The exponents of the characteristic polynomial below its degree (Matsumoto and Nishimura 1998, appendix A)."""
    whole, less = 1 << _WORDS | 1 << _MIDDLE, 1 << _WORDS - 1 | 1 << _MIDDLE - 1
    powers = [1]
    for _ in range(_LOWER):
        powers.append(_product(powers[-1], less))
    found = _product(powers[_LOWER], whole)
    for bit in range(_LOWER):
        if _TWIST >> bit & 1:
            found ^= _product(powers[_LOWER - 1 - bit], whole)
    if _TWIST >> _LOWER & 1:  # the highest bit
        found ^= 1
    return tuple(exponent for exponent in range(_DEGREE) if found >> exponent & 1)


def _product(one: int, few: int) -> int:
    """The product of two polynomials, the second with few terms."""
    found = 0
    while few:
        lowest = few & -few
        found ^= one * lowest
        few ^= lowest
    return found
