"""What must be gone once nobody asks for anything: blocks, reservations, retained outputs, permits, open records."""

from __future__ import annotations

import asyncio

import redis.asyncio

from tests.e2e.harness import Mesh

SETTLE_S = 15.0  # longer than orphan_grace
GAUGES: dict[str, tuple[str, ...]] = {
    "worker": (
        "trunkline_worker_requests",
        "trunkline_worker_retained_requests",
        "trunkline_worker_retained_bytes",
        "trunkline_worker_choices_running",
        "trunkline_worker_choices_waiting",
        "trunkline_worker_queued_prefill_tokens",
        "trunkline_worker_kv_tokens_reserved",
    ),
    "router": ("trunkline_router_queue_length", "trunkline_router_in_flight"),
    "gateway": ("trunkline_gateway_in_flight",),
}


async def assert_nothing_left(mesh: Mesh) -> None:
    """Waits for the mesh to come to rest and fails naming what stays."""
    left: dict[str, object] = {}
    for _ in range(int(SETTLE_S / 0.25)):
        left = await left_behind(mesh)
        if not left:
            return
        await asyncio.sleep(0.25)
    raise AssertionError(f"left behind after {SETTLE_S} s: {left}")


async def left_behind(mesh: Mesh) -> dict[str, object]:
    """What there is now, by name; empty once all is gone."""
    found: dict[str, object] = {}
    for process in mesh.processes():
        if process.role in GAUGES:
            samples = await asyncio.to_thread(mesh.metrics, process)
            for name in GAUGES[process.role]:
                if samples[name]:
                    found[f"{process.name} {name}"] = samples[name]
            if process.role == "worker" and (used := _blocks_used(samples)):
                found[f"{process.name} KV tokens in use"] = used
    found |= await _open_records(mesh)
    return found


async def _open_records(mesh: Mesh) -> dict[str, object]:
    store = redis.asyncio.Redis(port=mesh.redis_port(), decode_responses=True)
    found: dict[str, object] = {}
    try:
        async for key in store.scan_iter("tl:req:*", count=1000):
            state = await store.hget(key, "state")
            if state in ("QUEUED", "RUNNING"):
                found[key] = state
        async for key in store.scan_iter("tl:lim:*", count=1000):
            fields = await store.hgetall(key)
            leases = [field for field, value in fields.items() if _held(field, value)]
            if leases:
                found[key] = leases
    finally:
        await store.aclose()
    return found


def _held(field: str, value: str) -> bool:
    """A reservation, or a count of them that is not back at none."""
    return field.startswith("l:") or (field.startswith("n:") and value != "0")


def _blocks_used(samples: dict[str, float]) -> float:
    idle = samples["trunkline_worker_kv_tokens_free"] + samples["trunkline_worker_kv_tokens_cached"]
    return samples["trunkline_worker_kv_tokens_total"] - idle
