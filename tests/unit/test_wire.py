"""Hashes against committed vectors and against a second computation; liveness by rule 12."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from shared import wire
from shared.wire import Liveness, LoopLag, PeerState, cache_scope, engine_stalled, prefix_hashes, spec_hash
from tests.fakes.clock import FakeClock
from trunkline.worker.v1 import worker_pb2

VECTORS = Path(__file__).parent.parent / "vectors"
SPECS = json.loads((VECTORS / "spec_hash.json").read_text())
PREFIXES = json.loads((VECTORS / "prefix_hash.json").read_text())


def submission(fields: dict[str, Any]) -> worker_pb2.Submission:
    return ParseDict(fields, worker_pb2.Submission())


SAMPLING = "temperature topK topP minP repetitionPenalty presencePenalty frequencyPenalty logitBias seed logprobs"


# --- spec hash ---


def field(number: int, value: bytes) -> bytes:
    return struct.pack("<II", number, len(value)) + value


def recomputed_spec_hash(spec: dict[str, Any]) -> str:
    """From the vector's JSON by the rule's text, with none of the code under test."""
    out = b""
    if "generate" in spec:
        work, body = spec["generate"], b""
        if work.get("prompt"):
            body += field(1, b"".join(struct.pack("<I", i) for i in work["prompt"]))
        if work.get("choices"):
            indices = sorted(choice.get("index", 0) for choice in work["choices"])
            body += field(2, b"".join(struct.pack("<I", i) for i in indices))
        if "sampling" in work:
            sampling, inner = work["sampling"], b""
            names = (
                "temperature topK topP minP repetitionPenalty presencePenalty frequencyPenalty logitBias seed logprobs"
            )
            for number, name in enumerate(names.split(), start=1):
                if name == "logitBias":
                    bias = sorted((int(key), value) for key, value in sampling.get(name, {}).items())
                    inner += field(number, b"".join(struct.pack("<If", *entry) for entry in bias)) if bias else b""
                elif name in sampling:
                    integer = name in ("topK", "seed", "logprobs")
                    value = int(sampling[name]) if integer else sampling[name]
                    inner += field(number, struct.pack("<Q" if integer else "<f", value))
            body += field(3, inner)
        for number, name in ((4, "maxTokens"), (5, "minTokens")):
            body += field(number, struct.pack("<Q", work[name])) if work.get(name) else b""
        if work.get("stopTokenIds"):
            body += field(6, b"".join(struct.pack("<I", i) for i in work["stopTokenIds"]))
        body += field(7, struct.pack("<Q", 1)) if work.get("ignoreEos") else b""
        out += field(6, body)
    if "encode" in spec:
        work = spec["encode"]
        inputs = (b"".join(struct.pack("<I", i) for i in one.get("ids", [])) for one in work.get("inputs", []))
        body = field(1, b"".join(field(1, ids) for ids in inputs)) if work.get("inputs") else b""
        body += field(2, struct.pack("<Q", 1)) if work.get("normalize") else b""
        out += field(7, body)
    for number, name in ((9, "artefactHash"), (11, "adapterHash")):
        out += field(number, spec[name].encode()) if spec.get(name) else b""
    return hashlib.sha256(out).hexdigest()


@pytest.mark.parametrize("vector", SPECS, ids=[vector["name"] for vector in SPECS])
def test_spec_hashes_are_those_committed(vector: dict[str, Any]) -> None:
    assert spec_hash(submission(vector["submission"])).hex() == vector["sha256"]
    assert recomputed_spec_hash(vector["submission"]) == vector["sha256"]


def test_no_two_vectors_share_a_spec_hash_unless_they_say_so() -> None:
    hashes = [vector["sha256"] for vector in SPECS if "same_as" not in vector]
    assert len(set(hashes)) == len(hashes)
    by_name = {vector["name"]: vector["sha256"] for vector in SPECS}
    assert all(vector["sha256"] == by_name[vector["same_as"]] for vector in SPECS if "same_as" in vector)


# --- prefix hashes ---


@pytest.mark.parametrize("vector", PREFIXES, ids=[vector["name"] for vector in PREFIXES])
def test_prefix_hashes_are_those_committed(vector: dict[str, Any]) -> None:
    given = dict(vector["scope"])
    encoder = bytes.fromhex(given.pop("encoder_sha"))
    scope = cache_scope(encoder_sha=encoder, **given)
    hashes = prefix_hashes(scope, vector["ids"])
    assert (scope.hex(), [h.hex() for h in hashes]) == (vector["h0"], vector["hashes"])

    texts = ["tl1", given["artefact_hash"], given["adapter_hash"], given["kv_dtype"]]
    parts = [*(t.encode() for t in texts), encoder, given["share_group"].encode(), given["salt"].encode()]
    link = hashlib.sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()
    assert link.hex() == vector["h0"]
    for block, expected in enumerate(vector["hashes"]):
        ids = vector["ids"][16 * block : 16 * block + 16]
        link = hashlib.sha256(link + b"".join(struct.pack("<i", i) for i in ids)).digest()
        assert link.hex() == expected


def test_only_full_blocks_have_a_hash() -> None:
    for count, blocks in ((0, 0), (15, 0), (16, 1), (31, 1), (32, 2)):
        assert len(prefix_hashes(bytes(32), range(count))) == blocks


def test_fields_of_a_scope_cannot_flow_into_one_another() -> None:
    def scope(**changed: Any) -> bytes:
        fields: dict[str, Any] = {
            "artefact_hash": "a", "adapter_hash": "b", "kv_dtype": "c",
            "encoder_sha": b"", "share_group": "d", "salt": "e",
        }  # fmt: skip
        return cache_scope(**fields | changed)

    scopes = [
        scope(), scope(artefact_hash="ab", adapter_hash=""), scope(share_group="de", salt=""),
        scope(share_group="", salt="de"), scope(encoder_sha=b"d", share_group=""), scope(salt=""),
    ]  # fmt: skip
    assert len(set(scopes)) == len(scopes)


# --- liveness ---


@pytest.mark.parametrize(
    ("period", "silent", "state"),
    [
        (0.5, 0.0, PeerState.ALIVE),
        (0.5, 1.5, PeerState.ALIVE),
        (0.5, 1.51, PeerState.SUSPECT),
        (0.5, 5.0, PeerState.SUSPECT),
        (0.5, 5.01, PeerState.LOST),
        (2.0, 6.0, PeerState.ALIVE),  # 3 periods of an idle peer
        (2.0, 6.01, PeerState.SUSPECT),
        (2.0, 8.0, PeerState.SUSPECT),  # 4 periods are longer than 5 s
        (2.0, 8.01, PeerState.LOST),
    ],
)
def test_silence_is_judged_by_the_announced_period(
    clock: FakeClock, period: float, silent: float, state: PeerState
) -> None:
    peer = Liveness(clock)
    peer.heard(period)
    clock.advance(silent)
    assert peer.judge() is state
    peer.heard()
    assert peer.judge() is PeerState.ALIVE


def test_a_peer_never_heard_is_judged_from_its_beginning(clock: FakeClock) -> None:
    peer = Liveness(clock)
    assert peer.judge() is PeerState.ALIVE
    clock.advance(5.1)
    assert peer.judge() is PeerState.LOST


@pytest.mark.parametrize(("after", "state"), [(0.9, PeerState.SUSPECT), (1.01, PeerState.LOST)])
def test_a_broken_stream_has_a_second_to_be_opened_again(clock: FakeClock, after: float, state: PeerState) -> None:
    peer = Liveness(clock)
    peer.broke()
    assert peer.judge() is PeerState.SUSPECT
    clock.advance(after / 2)
    peer.broke()  # an attempt to open it that failed buys no time
    clock.advance(after / 2)
    assert peer.judge() is state


def test_a_stream_opened_again_in_time_is_no_loss(clock: FakeClock) -> None:
    peer = Liveness(clock)
    peer.broke()
    clock.advance(0.9)
    peer.heard()
    clock.advance(0.9)
    assert peer.judge() is PeerState.ALIVE


def test_a_refused_connection_is_a_loss_at_once(clock: FakeClock) -> None:
    peer = Liveness(clock)
    peer.refused()
    assert peer.judge() is PeerState.LOST
    assert peer.judge(loop_lag_s=10) is PeerState.LOST, "an own stall does not bring a dead process back"
    peer.heard()
    assert peer.judge() is PeerState.ALIVE


def test_an_own_stall_is_not_blamed_on_peers(clock: FakeClock) -> None:
    silent, broken = Liveness(clock), Liveness(clock)
    broken.broke()
    clock.advance(12)  # SIGSTOP and SIGCONT
    assert silent.judge(loop_lag_s=11.9) is PeerState.ALIVE
    assert broken.judge(loop_lag_s=11.9) is PeerState.SUSPECT
    clock.advance(4.9)
    assert silent.judge() is PeerState.SUSPECT, "after the stall the usual times hold again"
    clock.advance(0.2)
    assert silent.judge() is PeerState.LOST
    assert broken.judge() is PeerState.LOST


def test_a_small_lag_excuses_nothing(clock: FakeClock) -> None:
    peer = Liveness(clock)
    clock.advance(5.1)
    assert peer.judge(loop_lag_s=0.5) is PeerState.LOST


def test_loop_lag_is_seen_whichever_timer_wakes_first_and_lasts_while_sockets_drain(clock: FakeClock) -> None:
    lag = LoopLag(clock)
    for _ in range(20):
        clock.advance(0.1)
        lag.tick()
        assert lag.lag_s() == 0
    clock.advance(12)
    assert lag.lag_s() == pytest.approx(11.9), "before the tick"
    lag.tick()
    assert lag.lag_s() == pytest.approx(11.9), "after the tick"
    for _ in range(4):
        clock.advance(0.1)
        lag.tick()
    assert lag.lag_s() == pytest.approx(11.9), "while the sockets drain"
    for _ in range(2):
        clock.advance(0.1)
        lag.tick()
    assert lag.lag_s() == 0


@pytest.mark.parametrize(
    ("tick_age", "max_step", "waits", "stalled"),
    [
        (1.9, 0.01, True, False),
        (2.1, 0.01, True, True),
        (2.1, 0.01, False, False),  # an idle engine may be silent
        (5.9, 2.0, True, False),
        (6.1, 2.0, True, True),
        (10.1, 60.0, True, True),
    ],
)
def test_an_engine_is_stalled_when_work_waits_and_no_step_comes(
    tick_age: float, max_step: float, waits: bool, stalled: bool
) -> None:
    assert engine_stalled(tick_age_s=tick_age, max_step_s=max_step, work_waits=waits) is stalled


def test_the_version_spoken_is_the_version_written() -> None:
    assert ".".join(map(str, wire.PROTOCOL)) == wire.PROTOCOL_TEXT
    assert wire.spoken(wire.PROTOCOL_TEXT) == wire.PROTOCOL
    assert [wire.spoken(text) for text in ("1", "1.", ".1", "1.x", "-1.0", "1.0.0", "x")] == [None] * 7


def test_an_older_minor_lacks_what_a_newer_one_brought() -> None:
    older, newer = wire.Version(1, 0), wire.Version(1, 1)
    assert newer.features - older.features == {"logprobs"}
    assert (older.hands_back, newer.hands_back) == (False, True)
    assert newer.features == wire.FEATURES
