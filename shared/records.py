"""Request records: who owns a request, where it runs, how it ended.

Owns the hash `tl:req:{id}` and the aliases. The one rule: a record moves forward only, by compare-and-set on (epoch,
attempt, rank of state), and a terminal state never changes; whoever writes late changes nothing.
"""

from __future__ import annotations

import importlib.resources
from typing import Any, Final

from shared import keys
from shared.ids import incarnation_text
from shared.state import Script, Store
from trunkline.common.v1 import common_pb2

ENDED_TTL_S: Final = 3600
LIVE_TTL_S: Final = 24 * 3600
MAX_LIVE: Final = 5_000  # remembered for a store that comes back empty: with aliases they fill its queue of writes

_TRANSITION: Final = Script(importlib.resources.files("shared").joinpath("scripts/transition.lua").read_text())
_ALIAS: Final = Script("redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2]) return 1")
# The alias may name a later request by now, whose life is its own.
_ALIAS_END: Final = Script(
    "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('EXPIRE', KEYS[1], ARGV[2]) or 0"
)
_STATES: Final = {
    common_pb2.REQUEST_STATE_QUEUED: "QUEUED",
    common_pb2.REQUEST_STATE_RUNNING: "RUNNING",
    common_pb2.REQUEST_STATE_FINISHED: "FINISHED",
    common_pb2.REQUEST_STATE_FAILED: "FAILED",
    common_pb2.REQUEST_STATE_CANCELLED: "CANCELLED",
    common_pb2.REQUEST_STATE_EXPIRED: "EXPIRED",
}
_BY_NAME: Final = {name: state for state, name in _STATES.items()}


def terminal(state: int) -> bool:
    """Whether a request in this state has ended."""
    return state > common_pb2.REQUEST_STATE_RUNNING


class Records:
    """Writes never wait; what is live is written again when the store comes back empty."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._live: dict[str, tuple[common_pb2.RequestRecord, str]] = {}
        self._aliases: dict[str, str] = {}  # key by request id, of live requests
        store.on_birth_change(self._write_live)

    def write(self, record: common_pb2.RequestRecord, *, incarnation: str, worker: int = 0) -> None:
        """Write the record soon, unless a later one is there. `incarnation`: the owner's, 16 hexadecimal digits;
        `worker`: that of the worker that has it, 0 for none."""
        if terminal(record.state):
            self.forget(record.request_id)
        else:
            self._remember(record, incarnation)
        self._put(record, incarnation, worker)

    async def get(self, request_id: str) -> common_pb2.RequestRecord | None:
        """The record, None if there is none. Raises StateAway."""
        held = await self._store.hgetall(keys.req(request_id))
        return _record(request_id, held) if held else None

    def write_alias(self, tenant: str, client_id: str, request_id: str) -> None:
        """Let a client's own id stand for a request, soon; before the record that ends the request."""
        _make_room(self._aliases, request_id)
        self._aliases[request_id] = keys.alias(tenant, client_id)
        self._store.write_behind(_ALIAS, [self._aliases[request_id]], [request_id, LIVE_TTL_S])

    async def alias(self, tenant: str, client_id: str) -> str | None:
        """The request id behind a client's own id. Raises StateAway."""
        return await self._store.get(keys.alias(tenant, client_id))

    def _remember(self, record: common_pb2.RequestRecord, incarnation: str) -> None:
        _make_room(self._live, record.request_id)
        kept = common_pb2.RequestRecord()
        kept.CopyFrom(record)
        self._live[record.request_id] = (kept, incarnation)

    def forget(self, request_id: str) -> None:
        """It is over; its record is written, or someone else writes it."""
        self._live.pop(request_id, None)
        alias = self._aliases.pop(request_id, None)
        if alias is not None:
            self._store.write_behind(_ALIAS_END, [alias], [request_id, ENDED_TTL_S])

    def _put(self, record: common_pb2.RequestRecord, incarnation: str, worker: int = 0) -> None:
        ended = terminal(record.state)
        rank = min(int(record.state), int(common_pb2.REQUEST_STATE_FINISHED))
        head: list[str | int] = [record.epoch, record.attempt, rank, ENDED_TTL_S if ended else LIVE_TTL_S]
        written = fields(record) | {"ginc": incarnation}
        if worker:
            written["winc"] = incarnation_text(worker)
        args = [*head, *(item for pair in written.items() for item in pair)]
        self._store.write_behind(_TRANSITION, [keys.req(record.request_id)], args)

    def _write_live(self) -> None:
        for record, incarnation in self._live.values():
            self._put(record, incarnation)
        for request_id, alias in self._aliases.items():
            self._store.write_behind(_ALIAS, [alias], [request_id, LIVE_TTL_S])


def fields(record: common_pb2.RequestRecord) -> dict[str, str | int]:
    """A record as its hash holds it, without its place in time (epoch, attempt, rank)."""
    return {
        "state": _STATES[record.state],
        "tenant": record.tenant,
        "model": record.model,
        "version": record.version,
        "gateway": record.gateway_id,
        "worker": record.worker_id,
        "prompt": record.usage.prompt_tokens,
        "completion": record.usage.completion_tokens,
        "cached": record.usage.cached_tokens,
        "reason": record.reason,
        "trace": record.trace_id,
        "accepted": record.accepted_at_ms,
        "ended": record.ended_at_ms,
    }


def _make_room(remembered: dict[str, Any], request_id: str) -> None:
    if len(remembered) >= MAX_LIVE and request_id not in remembered:
        del remembered[next(iter(remembered))]


def _record(request_id: str, fields: dict[str, str]) -> common_pb2.RequestRecord:
    def number(name: str) -> int:
        return int(fields.get(name, "0"))

    return common_pb2.RequestRecord(
        request_id=request_id,
        tenant=fields.get("tenant", ""),
        model=fields.get("model", ""),
        version=fields.get("version", ""),
        state=_BY_NAME.get(fields.get("state", ""), common_pb2.REQUEST_STATE_UNSPECIFIED),
        gateway_id=fields.get("gateway", ""),
        worker_id=fields.get("worker", ""),
        epoch=number("epoch"),
        attempt=number("attempt"),
        usage=common_pb2.Usage(
            prompt_tokens=number("prompt"), completion_tokens=number("completion"), cached_tokens=number("cached")
        ),
        reason=fields.get("reason", ""),
        trace_id=fields.get("trace", ""),
        accepted_at_ms=number("accepted"),
        ended_at_ms=number("ended"),
    )
