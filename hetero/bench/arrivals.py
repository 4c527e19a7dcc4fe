"""What a load consists of: when conversations begin, how long their prompts and answers are, what they say; plain numbers from one seed.

Prompts are made of common words, about one token each in most vocabularies; the server's own count of tokens is what is reported.
"""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hetero.errors import BadOption

SPOKEN = ("time year people way day man thing woman life child world school state family student group country problem hand part place case week "
          "company system program question work government number night point home water room mother area money story fact month lot right study "
          "book eye job word business issue side kind head house service friend father power hour game line end member law car city name")
WORDS = SPOKEN.split()


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers above 0: "512", "uniform:100-500", "normal:512,100", "lognormal:512,0.6" (median, sigma of the logarithm)."""

    kind: str
    a: float
    b: float

    def draw(self, rng: random.Random) -> int:
        value = {"fixed": lambda: self.a, "uniform": lambda: rng.randint(int(self.a), int(self.b)), "normal": lambda: rng.gauss(self.a, self.b),
                 "lognormal": lambda: self.a * math.exp(rng.gauss(0.0, self.b))}[self.kind]()
        return max(1, round(value))


def lengths(text: str, flag: str) -> Lengths:
    """Reads a distribution. Raises BadOption naming the flag."""
    number = r"(\d+(?:\.\d+)?)"
    for pattern, kind in ((rf"(?:fixed:)?{number}", "fixed"), (rf"uniform:{number}-{number}", "uniform"), (rf"normal:{number},{number}", "normal"),
                          (rf"lognormal:{number},{number}", "lognormal")):
        if found := re.fullmatch(pattern, text.strip()):
            numbers = [float(n) for n in found.groups()]
            if numbers[0] >= 1 and not (kind == "uniform" and numbers[1] < numbers[0]):
                return Lengths(kind, numbers[0], numbers[1] if len(numbers) > 1 else 0.0)
    raise BadOption(f"{flag} {text!r} cannot be meant", "512, uniform:100-500, normal:512,100 or lognormal:512,0.6")


def words(count: int, rng: random.Random) -> str:
    """So many words; no two drawings begin alike, so that a prefix cache finds only what a conversation repeats."""
    return " ".join(rng.choice(WORDS) for _ in range(max(1, count)))


@dataclass(frozen=True)
class Load:
    """`conversations` of `turns` each. `rate`: conversations per second with exponential gaps, or None: `concurrency` of them at any time."""

    conversations: int
    concurrency: int
    rate: float | None
    prompt: Lengths
    output: Lengths
    turns: int = 1
    seed: int = 0

    def plans(self) -> Iterator[tuple[float, list[tuple[str, int]]]]:
        """(seconds after the start, [(what is said, most tokens of the answer)]) of each conversation."""
        rng, at = random.Random(self.seed), 0.0
        for _ in range(self.conversations):
            said = [(words(self.prompt.draw(rng), rng), self.output.draw(rng)) for _ in range(self.turns)]
            yield at, said
            if self.rate:
                at += rng.expovariate(self.rate)
