"""What the model sees and hears: coloured shapes on a plain ground, and tones."""

from __future__ import annotations

import random
from typing import Any

#: Red, green and blue of each, 0 to 255.
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 215, 40),
    "purple": (150, 50, 170),
    "grey": (128, 128, 128),
}
SHAPES = ("square", "circle", "triangle", "cross")
#: Pairs that training never shows.
UNSEEN = (("red", "triangle"), ("blue", "cross"), ("yellow", "circle"), ("green", "square"))
SOUNDS = ("a low tone", "a high tone", "a rising tone", "a falling tone", "a hiss", "two beeps")
#: Pixels per edge of a picture: 6 patches of 8, which are pooled to 2 by 2 soft tokens.
EDGE = 48
RATE = 16_000
#: Samples of a sound: four soft tokens of 40 ms.
SAMPLES = 2560


def picture(random: random.Random, colour: str, shape: str) -> Any:
    """A shape near the middle of a light or dark ground, a little noisy: uint8 of shape (48, 48, 3)."""
    import numpy

    noise = numpy.random.default_rng(random.randrange(2**32))
    size = random.uniform(13, 19)
    x, y = (EDGE / 2 + random.uniform(-4, 4) for _ in range(2))
    rows, columns = numpy.mgrid[0:EDGE, 0:EDGE] + 0.5
    across, down = columns - x, rows - y
    inside = {
        "square": (abs(across) < size * 0.85) & (abs(down) < size * 0.85),
        "circle": across**2 + down**2 < size**2,
        "triangle": (abs(down) < size) & (abs(across) < (down + size) / 2),
        "cross": ((abs(across) < size * 0.3) & (abs(down) < size)) | ((abs(down) < size * 0.3) & (abs(across) < size)),
    }[shape]
    ground = random.choice((random.uniform(0, 40), random.uniform(200, 255)))
    pixels = numpy.full((EDGE, EDGE, 3), ground)
    pixels[inside] = [value + random.uniform(-18, 18) for value in COLOURS[colour]]
    return (pixels + noise.normal(0, 5, pixels.shape)).clip(0, 255).astype("uint8")


def sound(random: random.Random, name: str) -> Any:
    """Samples of one of :data:`SOUNDS`, float32 of shape (2560,) between -1 and 1, with a little noise."""
    import numpy

    noise = numpy.random.default_rng(random.randrange(2**32))
    time = numpy.arange(SAMPLES) / RATE
    low, high, loud = random.uniform(180, 420), random.uniform(2200, 5200), random.uniform(0.2, 0.6)
    part = time / time[-1]
    beeps = ((part < 0.3) | (part > 0.65)).astype("float64")
    frequency, volume = {
        "a low tone": (low + 0 * part, 1),
        "a high tone": (high + 0 * part, 1),
        "a rising tone": (low * (high / low) ** part, 1),
        "a falling tone": (high * (low / high) ** part, 1),
        "a hiss": (0 * part, 0),
        "two beeps": (random.uniform(800, 1500) + 0 * part, beeps),
    }[name]
    wave = loud * volume * numpy.sin(2 * numpy.pi * numpy.cumsum(frequency) / RATE + random.uniform(0, 6))
    level = loud / 2 if name == "a hiss" else 0.01
    return (wave + noise.normal(0, level, SAMPLES)).clip(-1, 1).astype("float32")


def pairs(unseen: bool) -> list[tuple[str, str]]:
    """Colours with shapes: those of training, or those it never shows."""
    return [(colour, shape) for colour in COLOURS for shape in SHAPES if ((colour, shape) in UNSEEN) is unseen]
