"""Who has a request: claims, leases, outputs and take-overs in the state store.

Owns `tl:out`, `tl:own`, `tl:owners`, `tl:idem` and the fields of `tl:req` that only resumable requests have. The one
rule: every write of an owner names its epoch and is refused once another gateway has taken over; so whoever is told
that a write was made was the owner at that moment. Times are those of the store.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import msgspec

from gateway.transcript import Run
from shared import keys
from shared.errors import Reason, TrunklineError
from shared.ids import Identity, incarnation_text
from shared.records import ENDED_TTL_S, LIVE_TTL_S
from shared.state import Script, StateAway, Store, Write
from shared.wire import Stamp
from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2

LEASE_MS: Final = 6000
GONE_MS: Final = 15_000  # of silence after which a gateway's ordinary requests are given up
MAX_OUT_BYTES: Final = 16 << 20
MAX_PLAN_BYTES: Final = 4 << 20
OWN_TTL_S: Final = 600
_ENTRIES: Final = 256  # read at once
_START: Final = "0-0"


def _script(name: str) -> Script:
    return Script(importlib.resources.files("gateway").joinpath(f"scripts/{name}.lua").read_text())


_CLAIM, _HOLD, _APPEND, _TAKE_OVER = _script("claim"), _script("hold"), _script("append"), _script("take_over")
_FOLLOW, _SWEEP, _OWNERS, _KEY = _script("follow"), _script("sweep"), _script("owners"), _script("key")
_OWN: Final = Script("redis.call('SADD', KEYS[1], ARGV[1]) return redis.call('EXPIRE', KEYS[1], ARGV[2])")
_DISOWN: Final = Script("return redis.call('SREM', KEYS[1], ARGV[1])")
_KEEP: Final = Script("return redis.call('EXPIRE', KEYS[1], ARGV[1])")
_FORGET_OWNER: Final = Script("return redis.call('ZREM', KEYS[1], ARGV[1])")
_UNCLAIM: Final = Script(
    "if redis.call('HGET', KEYS[1], 'ginc') ~= ARGV[1] then return 0 end return redis.call('UNLINK', KEYS[1])"
)
_RELEASE: Final = Script(
    "if redis.call('HGET', KEYS[1], 'request') ~= ARGV[1] then return 0 end return redis.call('DEL', KEYS[1])"
)


class OwnerMoved(TrunklineError):
    """Another gateway has taken the request over: nothing of it may be settled or written here."""

    def __init__(self) -> None:
        super().__init__(Reason.OWNER_MOVED, "another gateway has taken the request over")


class Plan(msgspec.Struct, frozen=True):
    """What another gateway needs to go on with a request: serialised messages and who asked."""

    operation: str
    tenant: str
    key_id: str
    spec: bytes  # GenerationSpec, as it came
    submit: bytes  # SubmitRequest of attempt 1: prompt, resolved sampling, hashes
    served: bytes  # ModelVersion
    trace: tuple[str, str]  # traceparent, tracestate of its root span
    accepted_ms: int


class Ending(msgspec.Struct, frozen=True):
    """How a request ended: Finished, or the google.rpc.Status of its error; serialised."""

    finished: bytes = b""
    status: bytes = b""


class Written(IntEnum):
    """What became of an owner's write."""

    MADE = 1
    FENCED = 0  # another gateway owns the request
    LOST = -1  # the store does not know it, or not all of it: it came back empty, or with older data
    FULL = -2  # its outputs have reached their bound: it can no longer be resumed


@dataclass(frozen=True)
class Batch:
    """What is to be appended to a request's outputs, which hold `known` entries at least. `record`: the fields that an
    end writes."""

    request_id: str
    epoch: int
    known: int = 0
    runs: Sequence[Run] = ()
    ending: Ending | None = None
    record: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class News:
    """What was read of a request. `rank` 0: there is none; 3: it has ended."""

    rank: int
    resumable: bool
    lapsed: bool
    runs: list[Run]
    ending: Ending | None
    last: str  # entry read
    entries: int  # read


@dataclass(frozen=True)
class Swept:
    """What the sweep did with one request: none, over, parked or failed."""

    outcome: str
    idempotency_key: str = ""
    worked: bool = False


class Custody:
    """Each method is one round trip and raises StateAway, but for those that say they write behind.

    `store_now_ms` replaces the store's own clock where time is simulated; milliseconds, never 0. `idem_ttl_s`: for
    which an idempotency key stands for its request.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        store_now_ms: Callable[[], int] | None = None,
        idem_ttl_s: int = 24 * 3600,
    ) -> None:
        self._store = store
        self._mine: dict[str, str] = {}  # tenant by id, to tell a store that came back empty
        store.on_birth_change(self._note_forgotten)
        self._id = identity.id
        self._ginc = incarnation_text(identity.incarnation)
        self._now_ms = store_now_ms or (lambda: 0)
        self._idem_ttl_s = idem_ttl_s

    async def forgot(self, within_s: float) -> bool:
        """The store came back empty so lately, or just now: what it does not know may have been. Raises StateAway."""
        await self._store.look()
        if not self._store.available:
            raise StateAway
        return self._store.lost_within(within_s)

    def on_forgotten(self, callback: Callable[[], None]) -> None:
        """Call back when the store came back empty."""
        self._store.on_birth_change(callback)

    def _note_forgotten(self) -> None:
        for request_id, tenant in self._mine.items():
            self._store.write_behind(*self._own(request_id, tenant))

    def _own(self, request_id: str, tenant: str) -> Write:
        return _OWN, [keys.own(self._ginc)], [f"{request_id}:{tenant}", OWN_TTL_S]

    # Any request.

    def owned(self, request_id: str, tenant: str) -> Write:
        """The write that says who owns it, to go before anything is taken for it."""
        self._mine[request_id] = tenant
        return self._own(request_id, tenant)

    def leave(self, request_id: str) -> None:
        """It is not owned here any more; the store says so already, or another gateway finds it where it was."""
        self._mine.pop(request_id, None)

    def disown(self, request_id: str, tenant: str) -> None:
        """It is over. Written behind."""
        self.leave(request_id)
        self._store.write_behind(_DISOWN, [keys.own(self._ginc)], [f"{request_id}:{tenant}"])

    # Resumable requests, by their owner.

    async def claim(self, request_id: str, tenant: str, stamp: Stamp, plan: Plan, budget_ms: int, window_ms: int,
                    record: Mapping[str, str | int], key: tuple[str, bytes] | None = None) -> bool:  # fmt: skip
        """Write its record with everything it takes to go on with it elsewhere; False if another has taken it over.

        `key`: the idempotency key that the store forgot with it, and the hash of its body; False also if that stands
        for another request by now.
        """
        fields: dict[str, str | int] = {
            "attempt": stamp[1],
            "rank": 1,
            "state": "QUEUED",
            "gateway": self._id,
            "window": window_ms,
            "plan": msgspec.json.encode(plan).decode(),
            **record,
        }
        head: list[str | int] = [self._now_ms(), LEASE_MS, budget_ms, stamp[0], self._ginc, LIVE_TTL_S]
        claim: Write = (_CLAIM, [keys.req(request_id)], [*head, *_flat(fields)])
        writes = [self.owned(request_id, tenant), claim]
        if key is not None:
            writes.append((_KEY, [keys.idem(tenant, key[0])], [request_id, key[1].hex(), self._idem_ttl_s]))
        _, claimed, *stands = await self._store.run_all(writes)
        if claimed and not all(stands):
            self.unclaim(request_id, tenant)
        return bool(claimed) and all(stands)

    def unclaim(self, request_id: str, tenant: str) -> None:
        """It was not admitted. Written behind."""
        self._store.write_behind(_UNCLAIM, [keys.req(request_id)], [self._ginc])
        self.disown(request_id, tenant)

    async def hold(self, stamps: Sequence[tuple[str, int, int]], lease_ms: int = LEASE_MS) -> list[tuple[Written, int]]:
        """Renew leases of (id, epoch, attempt; 0 leaves it); what became of each, and for how many ms no follower was
        seen (-1: never). A lease of 0 lets go."""
        writes: list[Write] = [
            (_HOLD, [keys.req(request_id)], [self._now_ms(), lease_ms, epoch, attempt])
            for request_id, epoch, attempt in stamps
        ]
        answers = await self._store.run_all(writes)
        return [(Written(answer[0]), answer[1] if len(answer) > 1 else -1) for answer in answers]

    async def append(self, batches: Sequence[Batch]) -> list[tuple[Written, int]]:
        """Append to the outputs of several requests; what became of each, and how many entries there are, if made."""
        answers = await self._store.run_all([self._append(batch) for batch in batches])
        return [(Written(answer[0]), answer[1] if len(answer) > 1 else 0) for answer in answers]

    def _append(self, batch: Batch) -> Write:
        head = [self._now_ms(), LEASE_MS, batch.epoch, MAX_OUT_BYTES, ENDED_TTL_S if batch.ending else LIVE_TTL_S]
        ending = msgspec.json.encode(batch.ending).decode() if batch.ending else ""
        return (_APPEND, [keys.req(batch.request_id), keys.out(batch.request_id)],
                [*head, batch.known, _framed(batch.runs), ending, *_flat(batch.record)])  # fmt: skip

    # Resumable requests, by others.

    async def plan(self, request_id: str) -> tuple[Plan, dict[str, str]] | None:
        """Its plan and its record; None where it cannot be resumed."""
        fields = await self._store.hgetall(keys.req(request_id))
        if "plan" not in fields:
            return None
        return msgspec.json.decode(fields["plan"], type=Plan), fields

    async def follow(self, request_id: str, last: str = _START) -> News:
        """What was appended after the entry `last`, all of it; and word that somebody reads."""
        runs: list[Run] = []
        ending = None
        read = 0
        while True:
            rank, resumable, lapsed, entries = await self._store.run(
                _FOLLOW, [keys.req(request_id), keys.out(request_id)], [self._now_ms(), last, _ENTRIES]
            )
            read += len(entries)
            for entry, (name, value) in entries:
                last = entry
                if name == "r":
                    runs.extend(_unframed(value))
                else:
                    ending = msgspec.json.decode(value, type=Ending)
            if len(entries) < _ENTRIES:
                return News(rank, bool(resumable), bool(lapsed), runs, ending, last, read)

    async def take_over(self, request_id: str, tenant: str, again: bool = False) -> tuple[int, int] | None:
        """(epoch, ms left) if this gateway owns it now; None if it has an owner or is over. `again`: it was tried
        before, and what became of that is not known."""
        asked: list[str | int] = [self._now_ms(), LEASE_MS, self._id, self._ginc, int(again)]
        take: Write = (_TAKE_OVER, [keys.req(request_id)], asked)
        _, (epoch, *left) = await self._store.run_all([self.owned(request_id, tenant), take])
        return (epoch, left[0]) if epoch else None

    # Idempotency keys.

    def release(self, tenant: str, key: str, request_id: str) -> None:
        """A request of this key came to nothing: another may try. Written behind."""
        self._store.write_behind(_RELEASE, [keys.idem(tenant, key)], [request_id])

    # Owners that are gone.

    async def gone(self, after_ms: int) -> list[str]:
        """Say that this gateway lives; incarnations that have not for so long."""
        await self._store.run(_KEEP, [keys.own(self._ginc)], [OWN_TTL_S])
        return list(await self._store.run(_OWNERS, [keys.owners()], [self._now_ms(), self._ginc, after_ms]))

    async def owned_by(self, incarnation: str) -> list[tuple[str, str]]:
        """(id, tenant) of what an incarnation owns, or owned."""
        await self._store.run(_KEEP, [keys.own(incarnation)], [OWN_TTL_S])
        members = (member.partition(":") for member in await self._store.smembers(keys.own(incarnation)))
        return sorted((request_id, tenant) for request_id, _, tenant in members)

    async def sweep(self, incarnation: str, request_id: str, ending: Ending) -> Swept:
        """End a request of an owner that is gone, unless it may still be resumed."""
        outcome, *rest = await self._store.run(
            _SWEEP, [keys.req(request_id), keys.out(request_id)],
            [self._now_ms(), incarnation, ENDED_TTL_S, msgspec.json.encode(ending).decode()],
        )  # fmt: skip
        return Swept(outcome, rest[0], bool(rest[1])) if rest else Swept(outcome)

    def swept(self, incarnation: str, request_id: str, tenant: str) -> None:
        """Nothing is left to do for it. Written behind."""
        self._store.write_behind(_DISOWN, [keys.own(incarnation)], [f"{request_id}:{tenant}"])

    def forget_owner(self, incarnation: str) -> None:
        """It owns nothing any more. Written behind."""
        self._store.write_behind(_FORGET_OWNER, [keys.owners()], [incarnation])


def _flat(fields: Mapping[str, str | int]) -> list[str | int]:
    return [item for pair in fields.items() for item in pair]


_Frame = tuple[int, int, list[int], int, int | None, bytes]  # of tl:out: the fields of a run, log-probabilities packed
_frames: Final = msgspec.json.Decoder(list[_Frame])


def _framed(runs: Sequence[Run]) -> str:
    """Runs as they are kept; '' for none."""
    if not runs:
        return ""
    frames = [
        (run.choice, run.start, run.ids, run.finish, run.stop_token,
         worker_pb2.RunLogprobs(tokens=run.logprobs).SerializeToString())
        for run in runs
    ]  # fmt: skip
    return msgspec.json.encode(frames).decode()


def _unframed(text: str) -> list[Run]:
    return [
        Run(choice, start, ids, finish, stop, tuple(worker_pb2.RunLogprobs.FromString(packed).tokens))
        for choice, start, ids, finish, stop, packed in _frames.decode(text)
    ]


def record_fields(record: common_pb2.RequestRecord) -> dict[str, str | int]:
    """The fields of a record that do not change while it runs, for a claim."""
    return {
        "tenant": record.tenant,
        "model": record.model,
        "version": record.version,
        "trace": record.trace_id,
        "accepted": record.accepted_at_ms,
        "prompt": record.usage.prompt_tokens,
    }
