"""Philox4x32-10, the counter-based generator of Salmon et al. 2011 ("Parallel Random Numbers: As Easy as 1, 2, 3").

Owns the only randomness of generation. The one rule: a draw is a pure function of (seed, choice, position), so a
token never depends on the batch it was sampled in, on preemption, or on which worker drew it.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds over four u32 counter words and two u32 key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _MASK, (left >> 32) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The draw in [0, 1) for output token `position` of `choice`: 53 bits of the first two words. `seed` is a u64."""
    w0, w1, _, _ = philox4x32((position & _MASK, choice & _MASK, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return float(((w0 >> 5) << 26) | (w1 >> 6)) * 2.0**-53
