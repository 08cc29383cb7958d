"""One trace over all stages, and a receipt that accounts for the time."""

from __future__ import annotations

import asyncio
import json

import redis.asyncio

from tests.e2e.harness import Mesh, clients, spec, trunkctl

STAGES = {"admit", "router.queue", "router.dispatch", "worker.queue", "worker.prefill", "worker.decode"}


async def _spans(mesh: Mesh, trace_id: str) -> list[dict[str, object]]:
    """The trace as the store has it, once every stage has reported: each process sends its spans when it sees fit."""
    store = redis.asyncio.Redis(port=mesh.redis_port())
    try:
        async with asyncio.timeout(15):
            while True:
                spans = [json.loads(span) for span in await store.lrange(f"tl:trace:{trace_id}", 0, -1)]
                if {span["name"] for span in spans} >= STAGES and any(span["parent_id"] is None for span in spans):
                    return spans
                await asyncio.sleep(0.2)
    finally:
        await store.aclose()


async def test_a_request_has_one_trace_over_all_stages_and_every_parent_is_in_it(mesh: Mesh) -> None:
    async with clients(mesh) as opened:
        answer = await opened[0].stream(spec("The capital of France is", 8))
    spans = await _spans(mesh, answer.receipt.trace_id)
    ids = {span["span_id"] for span in spans}
    roots = [span for span in spans if span["parent_id"] not in ids]
    assert len(roots) == 1, f"more than one root: {[span['name'] for span in roots]}"
    assert {span["role"] for span in spans} == {"gateway", "router", "worker"}


async def test_the_receipt_adds_up_and_leaves_little_unattributed(mesh: Mesh) -> None:
    async with clients(mesh) as opened:
        answers = [await opened[index % 2].stream(spec(f"{index} birds", 16, ignore_eos=True)) for index in range(8)]
    shares = []
    for answer in answers:
        receipt = answer.receipt
        parts = (
            receipt.admit_ms + receipt.tokenise_ms + receipt.router_queue_ms + receipt.dispatch_ms
            + receipt.worker_queue_ms + receipt.prefill_ms + receipt.decode_ms + receipt.detokenise_ms
            + receipt.client_wait_ms + receipt.lost_attempts_ms + receipt.unattributed_ms
        )  # fmt: skip
        assert abs(parts - receipt.total_ms) < 0.1
        assert receipt.total_ms <= answer.total_s * 1e3
        shares.append(receipt.unattributed_ms - max(0.01 * receipt.total_ms, 2.0))
    assert sorted(shares)[len(shares) // 2] <= 0, f"unattributed is beyond its bound: {shares}"


async def test_trunkctl_draws_the_waterfall_of_a_request(mesh: Mesh) -> None:
    async with clients(mesh) as opened:
        answer = await opened[0].stream(spec("The capital of France is", 8))
    await _spans(mesh, answer.receipt.trace_id)
    done = await asyncio.to_thread(trunkctl, mesh.home, "trace", answer.request_id)
    assert done.returncode == 0, done.stderr
    for word in ("router.queue", "worker.prefill", "worker.decode", "unattributed"):
        assert word in done.stdout
