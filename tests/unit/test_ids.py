from __future__ import annotations

import random

from shared.ids import SYSTEM_RNG, incarnation_text, new_incarnation, new_request_id


class AllZeros(random.Random):
    def getrandbits(self, k: int, /) -> int:
        return 0


def test_identities_repeat_exactly_with_their_random_source() -> None:
    def drawn(seed: int) -> tuple[bytes, int]:
        rng = random.Random(seed)
        return new_request_id(rng), new_incarnation(rng)

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_a_request_id_is_16_bytes_even_when_it_begins_with_zeros() -> None:
    assert new_request_id(AllZeros()) == bytes(16)
    assert len({new_request_id(SYSTEM_RNG) for _ in range(1000)}) == 1000


def test_an_incarnation_is_never_the_one_that_means_none() -> None:
    assert new_incarnation(AllZeros()) != 0
    assert incarnation_text(new_incarnation(AllZeros())) == "0000000000000001"
    assert all(0 < new_incarnation(SYSTEM_RNG) < 2**64 for _ in range(1000))
