"""Fences, the ledger, bulk results: the parts with arithmetic of their own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.clock import FakeClock
from workers.door.execution import BulkResult, EngineBroken
from workers.door.fencing import Fences
from workers.door.ledger import Capacity, Ledger, Need

STAMPS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@given(st.lists(st.tuples(STAMPS, st.booleans()), min_size=1), STAMPS)
def test_a_stamp_is_refused_exactly_below_the_highest_seen_and_at_an_ended_one(
    marks: list[tuple[tuple[int, int], bool]], stamp: tuple[int, int]
) -> None:
    fences = Fences(FakeClock())
    for seen, ended in marks:
        (fences.ended if ended else fences.saw)(b"id", seen)
    highest = max(seen for seen, _ in marks)
    refused = stamp < highest or (stamp == highest and (highest, True) in marks)
    assert fences.refuses(b"id", stamp) == (highest if refused else None)
    assert fences.refuses(b"other", stamp) is None


def test_marks_are_bounded_and_the_oldest_goes_first() -> None:
    clock = FakeClock()
    fences = Fences(clock, capacity=3)
    for name in (b"a", b"b", b"c"):
        fences.ended(name, (1, 1))
    fences.ended(b"a", (1, 2))  # raised again: now the youngest
    fences.ended(b"d", (1, 1))
    assert (len(fences), fences.evicted) == (3, 1)
    assert fences.refuses(b"b", (1, 1)) is None
    assert fences.refuses(b"a", (1, 2)) == (1, 2)
    clock.advance(61)
    fences.sweep()
    assert len(fences) == 0


def test_a_mark_that_has_lapsed_does_not_come_back_when_the_id_is_seen_again() -> None:
    clock = FakeClock()
    fences = Fences(clock, ttl_s=60)
    fences.ended(b"a", (2, 2))
    clock.advance(61)
    fences.saw(b"a", (1, 1))
    assert fences.refuses(b"a", (1, 1)) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 4), st.integers(0, 50))))
def test_a_ledger_never_exceeds_its_capacity_and_ends_empty(acts: list[tuple[bool, int, int, int]]) -> None:
    ledger = Ledger(Capacity(requests=4, sequences=8, kv_tokens=100))
    taken: set[int] = set()
    for gives, key, sequences, kv in acts:
        need = Need(sequences, kv, kv)
        if gives:
            ledger.give(key)
            taken.discard(key)
        elif key not in taken and ledger.fits(need) is None:
            ledger.take(key, need)
            taken.add(key)
        assert ledger.requests == len(taken) <= 4
        assert ledger.sequences <= 8
        assert ledger.kv_tokens <= 100
    ledger.clear()
    assert (ledger.requests, ledger.sequences, ledger.kv_tokens) == (0, 0, 0)


def test_what_exceeds_the_kv_budget_by_itself_fits_only_alone() -> None:
    ledger = Ledger(Capacity(requests=4, sequences=8, kv_tokens=100))
    assert ledger.fits(Need(1, 500, 1)) is None
    ledger.take(1, Need(1, 1, 1))
    assert ledger.fits(Need(1, 500, 1)) is not None


@given(st.permutations(range(6)))
def test_a_bulk_result_is_ready_up_to_its_first_gap_in_whatever_order_it_comes(order: list[int]) -> None:
    result = BulkResult(6, 8, prompt_tokens=1)
    assert result.retained(0) == 0
    there: set[int] = set()
    for index in order:
        result.put(index, bytes([index]) * 8)
        there.add(index)
        gap = next(i for i in range(7) if i not in there)
        assert result.produced == gap * 8
    assert bytes(result.data) == b"".join(bytes([i]) * 8 for i in range(6))
    assert result.retained(40) == 48


@pytest.mark.parametrize(("index", "data"), [(-1, b"x" * 8), (6, b"x" * 8), (0, b"x" * 4)])
def test_an_embedding_without_a_place_is_refused(index: int, data: bytes) -> None:
    with pytest.raises(EngineBroken):
        BulkResult(6, 8, prompt_tokens=1).put(index, data)
