"""The block pool: counts, sharing, eviction order, and that its keys are the wire's."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shared.wire import prefix_hashes
from workers.engine.blocks import BlockPool, PoolCounts, PoolExhaustedError, blocks_for, next_key


def table(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, np.int32)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def filled(pool: BlockPool, numbers: list[int]) -> list[int]:
    """Held blocks published under keys of `numbers`."""
    blocks = pool.take(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        pool.publish(block, key(number))
    return blocks


def test_the_key_chain_is_that_of_the_wire() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 55).astype(np.int32)
    link, chain = b"s" * 32, []
    for start in (0, 16, 32):
        link = next_key(link, ids[start : start + 16])
        chain.append(link)
    assert chain == prefix_hashes(b"s" * 32, ids.tolist())


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks


def test_released_blocks_are_cached_if_published_and_free_otherwise() -> None:
    pool = BlockPool(4)
    published, plain = filled(pool, [1]), pool.take(1)
    assert pool.counts == PoolCounts(free=2, cached=0, used=2)
    pool.release([*published, *plain])
    assert pool.counts == PoolCounts(free=3, cached=1, used=0)
    assert pool.match([key(1)]) == published


def test_a_shared_block_stays_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    blocks = filled(pool, [1])
    pool.share(blocks)
    pool.release(blocks)
    pool.check([table(blocks)])
    assert not pool.writable(table(blocks))
    pool.release(blocks)
    assert pool.counts.cached == 1


def test_a_match_ends_at_the_first_key_that_is_not_there() -> None:
    pool = BlockPool(8)
    blocks = filled(pool, [1, 2, 4])
    assert pool.match([key(1), key(2), key(3), key(4)]) == blocks[:2]


def test_the_least_recently_released_goes_first_and_deep_blocks_before_the_prefix_they_hang_on() -> None:
    pool = BlockPool(4)
    old, new = filled(pool, [1, 2]), filled(pool, [3, 4])
    pool.release(old)
    pool.release(new)
    pool.share(pool.match([key(1)]))  # used again, so younger than the others
    pool.release([old[0]])
    order = []
    for _ in range(4):
        pool.take(1)
        order.append([number for number in (1, 2, 3, 4) if pool.match([key(number)])])
    assert order == [[1, 3, 4], [1, 3], [1], []]


def test_free_blocks_are_taken_before_anything_is_evicted() -> None:
    pool = BlockPool(3)
    pool.release(filled(pool, [1]))
    pool.take(2)
    assert pool.match([key(1)])
    pool.take(1)
    assert not pool.match([key(1)])


def test_taking_too_many_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(PoolExhaustedError):
        pool.take(3)
    assert pool.available == 2


def test_the_first_to_publish_a_key_keeps_it() -> None:
    pool = BlockPool(3)
    first, second = filled(pool, [1]), filled(pool, [1])
    assert pool.match([key(1)]) == first
    pool.release(second)
    assert pool.counts == PoolCounts(free=2, cached=0, used=1)


def test_forgotten_keys_are_found_no_more_and_their_idle_blocks_are_free() -> None:
    pool = BlockPool(4)
    held, idle = filled(pool, [1]), filled(pool, [2])
    pool.release(idle)
    pool.forget([key(1), key(2), key(3)])
    assert pool.match([key(1)]) == pool.match([key(2)]) == []
    assert pool.counts == PoolCounts(free=3, cached=0, used=1)
    pool.release(held)
    assert pool.counts.free == 4


def test_misuse_is_noticed() -> None:
    pool = BlockPool(2)
    block = pool.take(1)
    with pytest.raises(AssertionError, match="reference count"):
        pool.check([])
    pool.release(block)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(block)
    with pytest.raises(AssertionError, match="held block"):
        pool.publish(block[0], key(1))


@pytest.mark.parametrize("seed", range(30))
def test_random_use_never_loses_a_block_nor_hands_one_out_twice(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(1, 24))
    holders: list[list[int]] = []
    for _ in range(400):
        action = rng.choice(["take", "share", "publish", "release", "release", "forget"])
        if action == "take":
            count = rng.randint(0, 5)
            if count <= pool.available:
                blocks = pool.take(count)
                assert not {*blocks} & {block for holder in holders for block in holder}
                holders.append(blocks)
        elif action == "share":
            blocks = pool.match([key(number) for number in range(rng.randint(0, 4))])
            before, idle = pool.available, pool.idle(blocks)
            pool.share(blocks)
            assert pool.available == before - idle
            holders.append(blocks)
        elif action == "publish" and holders:
            for block in rng.choice(holders):
                if pool.writable(table([block])):
                    pool.publish(block, key(rng.randrange(12)))
        elif action == "release" and holders:
            pool.release(holders.pop(rng.randrange(len(holders))))
        elif action == "forget":
            pool.forget([key(rng.randrange(12))])
        pool.check([table(holder) for holder in holders])
        counts = pool.counts
        assert pool.available == counts.free + counts.cached == pool.total - counts.used
