"""Small parts of the gateway: acknowledgements, routers' turns, versions by weight, pacing, pieces."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.catalog import Catalog
from gateway.embedding import Pieces
from gateway.kit import Kits
from gateway.outbox import Outbox
from gateway.pacer import Pacer
from gateway.routers import Routers
from gateway.submission import session_key
from gateway.transcript import Fit
from shared.errors import Reason, TrunklineError
from shared.peers import Peers
from tests.fakes import mesh as fake
from tests.fakes.clock import FakeClock
from trunkline.worker.v1 import worker_pb2


def kind(message: worker_pb2.OutputsRequest | None) -> str | None:
    return message.WhichOneof("message") if message is not None else None


def test_acknowledgements_wait_for_sixteen_batches_or_fifty_milliseconds(clock: FakeClock) -> None:
    outbox = Outbox(clock)
    for seq in range(1, 16):
        outbox.took(seq)
    assert outbox.next(idle=False) is None
    outbox.took(16)
    message = outbox.next(idle=False)
    assert message is not None
    assert message.ack.seq == 16
    outbox.took(17)
    assert outbox.next(idle=False) is None
    clock.advance(0.051)
    message = outbox.next(idle=False)
    assert message is not None
    assert message.ack.seq == 17
    assert outbox.next(idle=False) is None


def test_cancels_go_before_acknowledgements_and_heartbeats_fill_silence(clock: FakeClock) -> None:
    outbox = Outbox(clock)
    outbox.took(1)
    outbox.cancel(b"i" * 16, (1, 2))
    clock.advance(0.06)
    assert [kind(outbox.next(idle=False)) for _ in range(3)] == ["cancel", "ack", None]
    clock.advance(0.45)
    assert outbox.next(idle=False) is None
    clock.advance(0.06)
    assert kind(outbox.next(idle=False)) == "heartbeat"
    clock.advance(0.6)
    assert outbox.next(idle=True) is None
    clock.advance(1.5)
    assert kind(outbox.next(idle=True)) == "heartbeat"


async def test_a_cancel_wakes_the_writer_at_once(clock: FakeClock) -> None:
    outbox = Outbox(clock)
    waiting = asyncio.create_task(outbox.wait(idle=True))
    await asyncio.sleep(0)
    outbox.cancel(b"i" * 16, (1, 1))
    async with asyncio.timeout(0.1):
        await waiting
    assert kind(outbox.next(idle=True)) == "cancel"


def test_routers_take_turns_and_one_that_failed_stands_aside_for_a_moment(clock: FakeClock) -> None:
    routers = Routers(Peers(None, "router", ["a:1", "b:1", "c:1"]), clock)
    for address in ("a:1", "b:1", "c:1"):
        routers.heard(address, draining=False)
    assert Counter(routers.next() for _ in range(9)) == {"a:1": 3, "b:1": 3, "c:1": 3}
    routers.failed("b:1")
    assert {routers.next() for _ in range(9)} == {"a:1", "c:1"}
    routers.heard("c:1", draining=True)
    assert {routers.next() for _ in range(9)} == {"a:1"}
    routers.failed("a:1")
    assert {routers.next() for _ in range(9)} == {"c:1"}
    clock.advance(1.1)
    routers.heard("b:1", draining=False)
    assert {routers.next() for _ in range(9)} == {"b:1"}


def test_without_routers_it_is_nobodys_turn(clock: FakeClock) -> None:
    assert Routers(Peers(None, "router"), clock).next() is None


def catalog(*weights: float, ready: tuple[int, ...] = ()) -> Catalog:
    nothing = cast(Any, None)
    own = Catalog(nothing, nothing, nothing, nothing, nothing, FakeClock(), random.Random(3))
    own._models = {
        fake.MODEL: [
            fake.version(str(number), weight=weight, ready_replicas=ready[number] if ready else 1)
            for number, weight in enumerate(weights)
        ]
    }
    return own


def test_versions_take_requests_by_weight() -> None:
    own = catalog(0.9, 0.1)
    chosen = Counter(own.choose(fake.MODEL).version for _ in range(2000))
    assert 120 < chosen["1"] < 290


def test_a_session_stays_with_its_version() -> None:
    own = catalog(0.5, 0.5)
    chosen = {own.choose(fake.MODEL, session_key("t", "s")).version for _ in range(50)}
    assert len(chosen) == 1
    spread = Counter(own.choose(fake.MODEL, session_key("t", str(number))).version for number in range(400))
    assert min(spread.values()) > 140


def test_a_version_without_replicas_takes_nothing_while_another_can_and_unknown_is_not_unavailable() -> None:
    own = catalog(0.5, 0.5, ready=(0, 2))
    assert {own.choose(fake.MODEL).version for _ in range(50)} == {"1"}
    assert catalog(1.0, ready=(0,)).choose(fake.MODEL).version == "0"
    assert {catalog(0.0, 0.0).choose(fake.MODEL).version for _ in range(5)} <= {"0", "1"}
    with pytest.raises(TrunklineError) as caught:
        own.choose("other")
    assert caught.value.reason is Reason.MODEL_UNKNOWN
    assert "/v1/models" in caught.value.message
    assert "ListModels" in caught.value.message


def test_before_any_router_has_told_of_models_none_is_called_unknown() -> None:
    own = catalog()
    own._models = {}
    with pytest.raises(TrunklineError) as caught:
        own.choose(fake.MODEL)
    assert (caught.value.reason, caught.value.message) == (Reason.NO_REPLICA, "no router can be reached")
    assert caught.value.retry_after_s == 1.0


def test_streams_are_held_back_only_while_the_loop_is_late() -> None:
    pacer = Pacer()
    pacer.streams = 500
    for number in range(100):
        pacer.waited(0.001, number * 0.02)
    assert pacer.hold_s == 0
    for number in range(100, 130):
        pacer.waited(0.05, number * 0.02 - 0.01)
        pacer.waited(0.0, number * 0.02)  # the worst of a while counts
    assert pacer.hold_s == 0.25
    for number in range(130, 200):
        pacer.waited(0.001, number * 0.02)
    assert pacer.hold_s == 0


def test_few_streams_cannot_fill_the_loop_and_are_hardly_held_back() -> None:
    pacer = Pacer()
    pacer.streams = 3
    for number in range(30):
        pacer.waited(0.05, number * 0.02)
    assert pacer.hold_s == 0.003


@settings(max_examples=60, deadline=None)
@given(total=st.integers(0, 60), data=st.data())
def test_pieces_join_to_the_result_however_they_overlap(total: int, data: st.DataObject) -> None:
    result = bytes(number % 251 for number in range(total))
    pieces = Pieces(total)
    while not pieces.complete:
        start = data.draw(st.integers(0, len(pieces.data)))
        end = data.draw(st.integers(start + 1, min(total, start + 20)))
        assert pieces.add(piece(result, start, end)) in (Fit.TAKEN, Fit.KNOWN)
    assert bytes(pieces.data) == result


def test_pieces_that_leave_a_gap_differ_or_reach_beyond_the_end_are_refused() -> None:
    result = bytes(range(20))
    pieces = Pieces(20)
    assert pieces.add(piece(result, 0, 8)) is Fit.TAKEN
    assert pieces.add(piece(result, 9, 12)) is Fit.GAP
    assert pieces.add(piece(result[::-1], 0, 12)) is Fit.DIVERGED
    assert pieces.add(piece(result + b"x", 8, 21, total=20)) is Fit.DIVERGED
    assert pieces.add(piece(result, 8, 12, total=24)) is Fit.DIVERGED
    assert len(pieces.data) == 8


def piece(result: bytes, start: int, end: int, total: int | None = None) -> worker_pb2.BulkPiece:
    return worker_pb2.BulkPiece(
        kind=worker_pb2.BulkPiece.KIND_EMBEDDING,
        offset=start,
        total=len(result) if total is None else total,
        data=result[start:end],
    )


@pytest.mark.parametrize(("ready", "level"), [(0, "INFO"), (1, "WARNING")])
async def test_files_that_cannot_be_had_are_a_warning_unless_every_replica_still_loads(
    ready: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        async def asset(self, address: str, sha256: str) -> AsyncIterator[None]:
            raise TrunklineError(Reason.VERSION_GONE, "no replica has this file")
            yield

    routers = Routers(Peers(None, "router", ["a:1"]), FakeClock())
    routers.heard("a:1", draining=False)
    kits = Kits(cast(Any, Refusing()), routers, FakeClock())
    with caplog.at_level("INFO", logger="gateway.kit"), pytest.raises(TrunklineError, match="NO_REPLICA"):
        await kits.get(fake.version("1", weight=1.0, ready_replicas=ready))
    assert {record.levelname for record in caplog.records} == {level}
