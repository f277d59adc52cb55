"""What the model reads: questions and answers that a generator draws, and first lines of Python's docstrings."""

from __future__ import annotations

import builtins
import inspect
import random
from dataclasses import dataclass

ANIMALS = ("fox", "owl", "bear", "hare", "mole", "crow", "frog", "wolf")
TRAITS = ("old", "young", "small", "big", "shy", "brave")
PLACES = ("by the river", "on the hill", "in the wood", "under the bridge", "near the mill", "at the lake")
THINGS = ("a key", "a coin", "a bell", "a rope", "a lamp", "a book", "a ring", "a drum")
FOODS = ("a berry", "a nut", "an apple", "some bread", "a pear", "some corn")
ENDS = ("They became friends.", "Then it began to rain.", "They went home.", "The moon came out.")

#: Asked and answered in these words.
FACTS = {
    "What colour is the sky?": "The sky is blue.",
    "What colour is grass?": "Grass is green.",
    "What colour is snow?": "Snow is white.",
    "What colour is a lemon?": "A lemon is yellow.",
    "What colour is coal?": "Coal is black.",
    "Who are you?": "I am a tiny Gemma 4.",
    "How are you?": "I am well, thank you.",
    "What do you like?": "I like stories and shapes.",
    "How many legs has a fox?": "A fox has four legs.",
    "How many legs has a crow?": "A crow has two legs.",
    "How many days has a week?": "A week has seven days.",
    "How many months has a year?": "A year has twelve months.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What is the opposite of big?": "The opposite of big is small.",
    "What is the opposite of day?": "The opposite of day is night.",
    "What comes after Monday?": "Tuesday comes after Monday.",
    "What comes after Friday?": "Saturday comes after Friday.",
    "What comes after spring?": "Summer comes after spring.",
    "Where does a frog live?": "A frog lives in a pond.",
    "Where does a mole live?": "A mole lives under the ground.",
    "What does an owl eat?": "An owl eats mice.",
    "What does a hare eat?": "A hare eats grass.",
    "Why is the sky blue?": "The air scatters blue light more than red light.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
}
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_FUNCTIONS = ("abs", "all", "any", "chr", "dir", "divmod", "hash", "hex", "id", "input", "iter", "len", "next", "oct")


@dataclass(frozen=True)
class Turn:
    """A question and its answer; ``kind`` says what was drawn."""

    kind: str
    question: str
    answer: str


def docstrings() -> dict[str, str]:
    """What functions of this interpreter say that they do: the first sentence, at most 64 characters of it."""
    found = {}
    for name in _FUNCTIONS:
        line = (inspect.getdoc(getattr(builtins, name)) or "").partition("\n")[0]
        if line and len(line) <= 64 and "(" not in line:
            found[f"What does {name} do?"] = line
    return found


def story(random: random.Random) -> Turn:
    """A story of two animals, in three sentences."""
    first, second = random.sample(ANIMALS, 2)
    one, other = random.sample(TRAITS, 2)
    told = (
        f"Once {_a(one)} {first} met {_a(other)} {second} {random.choice(PLACES)}. The {first} was hungry, so the "
        f"{second} gave it {random.choice(FOODS)}. {random.choice(ENDS)}"
    )
    return Turn("story", f"Tell of {_a(first)} and {_a(second)}.", told)


def reading(random: random.Random) -> Turn:
    """Who has which thing: the answer is in the question."""
    who, what = random.sample(ANIMALS, 2), random.sample(THINGS, 2)
    told = " ".join(f"The {animal} has {thing}." for animal, thing in zip(who, what, strict=True))
    place = random.randrange(2)
    asked = what[place].replace("a ", "the ")
    return Turn("reading", f"{told} Who has {asked}?", f"The {who[place]} has {asked}.")


def addition(random: random.Random) -> Turn:
    """Two numbers whose sum is at most ten."""
    first = random.randrange(1, 10)
    second = random.randrange(0, 11 - first)
    words = [_NUMBERS[value] for value in (first, second, first + second)]
    return Turn("addition", f"What is {words[0]} plus {words[1]}?", f"{words[0]} plus {words[1]} is {words[2]}.")


def fact(random: random.Random) -> Turn:
    """One of :data:`FACTS`."""
    question = random.choice(tuple(FACTS))
    return Turn("fact", question, FACTS[question])


def docstring(random: random.Random) -> Turn:
    """One of :func:`docstrings`."""
    known = docstrings()
    question = random.choice(tuple(known))
    return Turn("docstring", question, known[question])


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
