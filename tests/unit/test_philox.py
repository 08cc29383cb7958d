"""Philox4x32-10 against the vectors its authors publish with Random123."""

from __future__ import annotations

import pytest

from workers.engine.philox import Words, philox4x32, uniform

ONES = 0xFFFFFFFF

VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_the_generator_gives_the_published_words(counter: Words, key: tuple[int, int], words: Words) -> None:
    assert philox4x32(counter, key) == words


def test_a_draw_depends_on_every_bit_of_the_seed_the_choice_and_the_position() -> None:
    draws = [
        uniform(seed, choice, position) for seed in (0, 1, 1 << 32, 1 << 63) for choice in (0, 1) for position in (0, 1)
    ]
    assert len(set(draws)) == len(draws)
    assert uniform(2**64 - 1, 3, 7) == uniform(2**64 - 1, 3, 7)


def test_draws_lie_in_the_unit_interval_and_are_spread_evenly() -> None:
    draws = [uniform(5, 0, position) for position in range(20_000)]
    assert min(draws) >= 0.0
    assert max(draws) < 1.0
    bins = [0] * 50
    for draw in draws:
        bins[int(draw * 50)] += 1
    chi_square = sum((count - 400) ** 2 / 400 for count in bins)
    assert chi_square < 85.4  # 99.9 % of 49 degrees of freedom
