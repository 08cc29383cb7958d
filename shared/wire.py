"""The wire's arithmetic: protocol version, time limits, hashes, and who counts as alive. All of it pure.

The one rule: hashes are made here and nowhere else, over the fields laid down below, never over serialised protobuf
(whose bytes may differ between versions for equal messages).
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple

from shared.clock import Clock
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2
from trunkline.worker.v1 import worker_pb2


class Version(NamedTuple):
    """A version of the protocol. Those of one major interoperate: what a minor brought, a peer of the one before does
    not send and is not sent.

        1.0   generate, encode
        1.1   logprobs, a feature; routers that drain hand back what waits (DRAINING) instead of placing it all
    """

    major: int
    minor: int

    @property
    def text(self) -> str:
        """As metadata carries it."""
        return f"{self.major}.{self.minor}"

    @property
    def features(self) -> frozenset[str]:
        """What a process of this version may ask for, or offer."""
        return frozenset(name for name, since in _FEATURES.items() if since <= self.minor)

    @property
    def hands_back(self) -> bool:
        """A gateway of this version takes DRAINING from a router for a word on that router alone."""
        return self.minor >= 1


_FEATURES: Final = {"generate": 0, "encode": 0, "logprobs": 1}  # and the minor that brought each
PROTOCOL: Final = Version(1, 1)
PROTOCOL_TEXT: Final = PROTOCOL.text
FEATURES: Final = PROTOCOL.features


def spoken(text: str) -> Version | None:
    """The version that a peer's metadata name; None for what is none."""
    major, _, minor = text.partition(".")
    return Version(int(major), int(minor)) if _number(major) and _number(minor) else None


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


HEARTBEAT_S: Final = 0.5
IDLE_HEARTBEAT_S: Final = 2.0
ORPHAN_GRACE_S: Final = 10.0
TOMBSTONE_S: Final = 60.0
LOST_AFTER_S: Final = 5.0
REOPEN_S: Final = 1.0

BLOCK_TOKENS: Final = 16

Stamp = tuple[int, int]
"""(owner epoch, attempt), compared lexicographically."""


# --- spec hash ------------------------------------------------------------------------------------------------------
#
# A message is its fields in field-number order, each as  u32 field number · u32 length · value  (little-endian); an
# absent field is omitted: optional ones when unset, others when 0, false or empty. Values: integers and booleans u64,
# floats f32, strings UTF-8, id lists u32 each, a map its entries (u32 key · f32 value) by key, messages likewise.


def spec_hash(sub: worker_pb2.Submission, prompt: Sequence[int] | None = None) -> bytes:
    """32 bytes naming what the tokens depend on: work, artefact, adapter.

    Equal for every attempt of a request: of the choices only the indices count. Never emitted tokens, budget,
    priority, features or trace. `prompt`: the ids of `sub.generate.prompt`, where they are at hand as a list, which is
    read twenty times as fast.
    """
    return hashlib.sha256(b"".join(_submission_fields(sub, prompt))).digest()


def body_hash(spec: inference_pb2.GenerationSpec) -> bytes:
    """32 bytes naming what a client asked for, in the same form over the fields of GenerationSpec.

    Counted: model, input, sampling, max_tokens, min_tokens, stop, stop_token_ids, include_stop, ignore_eos, n, echo,
    return_token_ids (1 to 14). Not counted, so that they may differ between two tries: priority, deadline_ms,
    client_request_id, session_id, cache_salt, resume_window_ms, idempotency_key.
    """
    return hashlib.sha256(b"".join(_spec_fields(spec))).digest()


def _spec_fields(spec: inference_pb2.GenerationSpec) -> Iterator[bytes]:
    yield from _text(1, spec.model)
    match spec.WhichOneof("input"):
        case "prompt":
            yield _field(2, spec.prompt.encode())
        case "prompt_token_ids":
            yield _field(3, b"".join(_ids(1, spec.prompt_token_ids.ids)))
        case "chat":
            yield _field(4, b"".join(_chat_fields(spec.chat)))
    if spec.HasField("sampling"):
        yield _field(5, b"".join(_sampling_fields(spec.sampling)))
    if spec.HasField("max_tokens"):
        yield _field(6, struct.pack("<Q", spec.max_tokens))
    yield from _integer(7, spec.min_tokens)
    yield from (_field(8, stop.encode()) for stop in spec.stop)
    yield from _ids(9, spec.stop_token_ids)
    yield from _integer(10, spec.include_stop)
    yield from _integer(11, spec.ignore_eos)
    if spec.HasField("n"):
        yield _field(12, struct.pack("<Q", spec.n))
    yield from _integer(13, spec.echo)
    yield from _integer(14, spec.return_token_ids)


def _chat_fields(chat: inference_pb2.Chat) -> Iterator[bytes]:
    for message in chat.messages:
        yield _field(1, b"".join([*_text(1, message.role), *_text(2, message.content)]))
    yield from _integer(2, chat.continue_final_message)


def _submission_fields(sub: worker_pb2.Submission, prompt: Sequence[int] | None) -> Iterator[bytes]:
    work = sub.WhichOneof("work")
    if work == "generate":
        yield _field(6, b"".join(_generate_fields(sub.generate, prompt)))
    elif work == "encode":
        yield _field(7, b"".join(_encode_fields(sub.encode)))
    yield from _text(9, sub.artefact_hash)
    yield from _text(11, sub.adapter_hash)


def _generate_fields(work: worker_pb2.GenerateWork, prompt: Sequence[int] | None) -> Iterator[bytes]:
    yield from _ids(1, work.prompt if prompt is None else prompt)
    yield from _ids(2, sorted(choice.index for choice in work.choices))
    if work.HasField("sampling"):
        yield _field(3, b"".join(_sampling_fields(work.sampling)))
    yield from _integer(4, work.max_tokens)
    yield from _integer(5, work.min_tokens)
    yield from _ids(6, work.stop_token_ids)
    yield from _integer(7, work.ignore_eos)


_SAMPLING: Final = (
    (1, "temperature", "<f"),
    (2, "top_k", "<Q"),
    (3, "top_p", "<f"),
    (4, "min_p", "<f"),
    (5, "repetition_penalty", "<f"),
    (6, "presence_penalty", "<f"),
    (7, "frequency_penalty", "<f"),
    (8, "logit_bias", ""),
    (9, "seed", "<Q"),
    (10, "logprobs", "<Q"),
)


def _sampling_fields(sampling: common_pb2.Sampling) -> Iterator[bytes]:
    for number, name, form in _SAMPLING:
        if name == "logit_bias":
            entries = [struct.pack("<If", key, sampling.logit_bias[key]) for key in sorted(sampling.logit_bias)]
            if entries:
                yield _field(number, b"".join(entries))
        elif sampling.HasField(name):
            yield _field(number, struct.pack(form, getattr(sampling, name)))


def _encode_fields(work: worker_pb2.EncodeWork) -> Iterator[bytes]:
    if work.inputs:
        yield _field(1, b"".join(_field(1, _u32s(tokens.ids)) for tokens in work.inputs))
    yield from _integer(2, work.normalize)


def _field(number: int, value: bytes) -> bytes:
    return struct.pack("<II", number, len(value)) + value


def _integer(number: int, value: int) -> Iterator[bytes]:
    if value:
        yield _field(number, struct.pack("<Q", value))


def _text(number: int, value: str) -> Iterator[bytes]:
    if value:
        yield _field(number, value.encode())


def _ids(number: int, ids: Iterable[int]) -> Iterator[bytes]:
    data = _u32s(ids)
    if data:
        yield _field(number, data)


def _u32s(ids: Iterable[int]) -> bytes:
    """Ids as u32 little-endian; also the int32 form of rule 15, since ids are below 2^31."""
    values = array("I", ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


# --- prefix hashes --------------------------------------------------------------------------------------------------


def cache_scope(
    *, artefact_hash: str, adapter_hash: str, kv_dtype: str, encoder_sha: bytes, share_group: str, salt: str
) -> bytes:
    """h0: 32 bytes naming who may share cached blocks. Strings count as UTF-8, hashes as their hexadecimal text.

    `share_group` is the tenant where no share group is configured; `encoder_sha` is empty without an encoder.
    """
    texts = ("tl1", artefact_hash, adapter_hash, kv_dtype)
    parts = [*(text.encode() for text in texts), encoder_sha, share_group.encode(), salt.encode()]
    return hashlib.sha256(b"".join(struct.pack("<I", len(part)) + part for part in parts)).digest()


def prefix_hashes(scope: bytes, ids: Sequence[int]) -> list[bytes]:
    """Chain over the full blocks of 16 tokens: h(i+1) = sha256(h(i) ‖ 16 tokens as int32 LE), 32 bytes each."""
    data = _u32s(ids)
    block = 4 * BLOCK_TOKENS
    hashes = []
    link = scope
    for start in range(0, len(data) - block + 1, block):
        link = hashlib.sha256(link + data[start : start + block]).digest()
        hashes.append(link)
    return hashes


# --- liveness -------------------------------------------------------------------------------------------------------


class PeerState(Enum):
    """What is thought of a peer. SUSPECT gets no new work; LOST holds nothing any more."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


class Liveness:
    """One peer's stream in the eyes of rule 12. Pure: tell it what happened, then ask.

    Suspect after 3 missed heartbeats, or while a broken stream is being reopened. Lost when refused, when a broken
    stream is not heard from again within 1 s, or after max(5 s, 4 periods) of silence.
    """

    def __init__(self, clock: Clock, period_s: float = HEARTBEAT_S) -> None:
        self._clock = clock
        self._period_s = period_s
        self._heard_at = clock.monotonic()
        self._broke_at: float | None = None
        self._refused = False

    def heard(self, period_s: float | None = None) -> None:
        """Any message came. `period_s`: the heartbeat period the peer announced."""
        self._heard_at = self._clock.monotonic()
        self._broke_at = None
        self._refused = False
        if period_s:
            self._period_s = period_s

    def broke(self) -> None:
        """The stream was reset; it has 1 s to be heard from again. Saying so again does not extend it."""
        if self._broke_at is None:
            self._broke_at = self._clock.monotonic()

    def refused(self) -> None:
        """Nothing listens at the peer's address any more, or another incarnation answered."""
        self._refused = True

    def judge(self, loop_lag_s: float = 0.0) -> PeerState:
        """What to think of the peer now. A `loop_lag_s` above a heartbeat restarts its timers: the silence was ours."""
        now = self._clock.monotonic()
        if loop_lag_s > HEARTBEAT_S:
            self._heard_at = now
            self._broke_at = None if self._broke_at is None else now
        silent = now - self._heard_at
        if self._refused or silent > max(LOST_AFTER_S, 4 * self._period_s):
            return PeerState.LOST
        if self._broke_at is not None:
            return PeerState.LOST if now - self._broke_at > REOPEN_S else PeerState.SUSPECT
        return PeerState.SUSPECT if silent > 3 * self._period_s else PeerState.ALIVE


def engine_stalled(*, tick_age_s: float, max_step_s: float, work_waits: bool) -> bool:
    """Rule 12's separate word on the engine: work waits and no step came within max(3 steps, 2 s), at most 10 s."""
    return work_waits and tick_age_s > min(max(3 * max_step_s, 2.0), 10.0)


class LoopLag:
    """How late this process's own event loop is. Keep `run` going as a task; read `lag_s` before judging peers.

    A stopped process must not blame its peers when it wakes: whichever timer runs first then, `lag_s` counts the time
    since the last tick, and goes on telling the worst of the last heartbeat while the sockets drain.
    """

    TICK_S: Final = 0.1

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ticked_at = clock.monotonic()
        self._late: deque[tuple[float, float]] = deque(maxlen=64)  # (when, how late)

    def tick(self) -> None:
        """Note that the loop is running now."""
        now = self._clock.monotonic()
        late = now - self._ticked_at - self.TICK_S
        self._ticked_at = now
        if late > HEARTBEAT_S:
            self._late.append((now, late))

    def lag_s(self) -> float:
        """Seconds: the larger of the present lateness and the worst seen within the last heartbeat."""
        now = self._clock.monotonic()
        while self._late and now - self._late[0][0] > HEARTBEAT_S:
            self._late.popleft()
        present = max(0.0, now - self._ticked_at - self.TICK_S)
        return max(present, *(late for _, late in self._late)) if self._late else present

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(self.TICK_S)
