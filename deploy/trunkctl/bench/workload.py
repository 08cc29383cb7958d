"""What a load is made of: when requests come, and what each asks for.

Pure. The one rule: request `number` is a function of (mix, number) alone, so that every process and every server under
test gets the same ones.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

EDGE = 300  # ids at either end of a vocabulary that are left out: special tokens live there
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True)
class Lengths:
    """Tokens: log-normal around `median` within [`least`, `most`]; always the median where `sigma` is 0."""

    median: int
    sigma: float = 0.0
    least: int = 1
    most: int = 1 << 20

    def draw(self, rng: random.Random) -> int:
        """A length."""
        if not self.sigma:
            return self.median
        return min(self.most, max(self.least, int(rng.lognormvariate(math.log(self.median), self.sigma))))


def read_lengths(text: str) -> Lengths:
    """From `N` or `MEDIAN,SIGMA,MIN,MAX`. Raises ValueError."""
    wrong = ValueError(f"{text!r} is neither N nor MEDIAN,SIGMA,MIN,MAX")
    try:
        median, *rest = text.split(",")
        sigma, least, most = rest or ("0", "1", str(Lengths.most))
        made = Lengths(int(median), float(sigma), int(least), int(most))
    except ValueError:
        raise wrong from None
    if not (1 <= made.least <= made.most and made.median >= 1 and made.sigma >= 0):
        raise wrong
    return made


@dataclass(frozen=True)
class Mix:
    """What requests ask for. `text`: prompts are words, about one token each, instead of ids below `vocab`."""

    seed: int
    prompt: Lengths
    output: Lengths
    vocab: int
    text: bool = False


@dataclass(frozen=True)
class Request:
    """One request: its prompt, as text or ids, and how many tokens it asks for."""

    number: int
    prompt: str | list[int]
    max_tokens: int


def request(mix: Mix, number: int) -> Request:
    """Request `number` of the load."""
    rng = random.Random(f"{mix.seed}/{number}")
    count, max_tokens = mix.prompt.draw(rng), mix.output.draw(rng)
    if mix.text:
        return Request(number, " ".join(rng.choices(WORDS, k=count)), max_tokens)
    edge = min(EDGE, mix.vocab // 4)
    return Request(number, rng.choices(range(edge, mix.vocab - edge), k=count), max_tokens)


def arrivals(seed: int, rate: float, *, seconds: float | None = None, count: int | None = None) -> Iterator[float]:
    """Seconds after the beginning at which requests come: a Poisson process of `rate` per second, for so many seconds
    or requests, whichever ends first."""
    rng, now = random.Random(f"{seed}/arrivals"), 0.0
    for number in itertools.count():
        now += rng.expovariate(rate)
        if (seconds is not None and now >= seconds) or number == count:
            return
        yield now
