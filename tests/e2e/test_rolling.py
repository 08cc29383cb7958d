"""Every process of a mesh is restarted under load, from one protocol minor to the next, and no request fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from shared.errors import Reason, from_rpc
from shared.wire import PROTOCOL
from tests.e2e.leaks import assert_nothing_left
from tests.e2e.rolling import MODEL, FormulaMesh, Load
from trunkline.admin.v1 import admin_pb2, admin_pb2_grpc
from trunkline.inference.v1 import inference_pb2 as pb
from trunkline.inference.v1 import inference_pb2_grpc

NEW, OLD = PROTOCOL.minor, PROTOCOL.minor - 1
FIRST, SECOND = ("worker-1", "router-1", "gateway-1"), ("worker-2", "router-2", "gateway-2")
RATE = 6.0


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[FormulaMesh]:
    """Two of each role, all of the older minor."""
    async with FormulaMesh.lay_out(tmp_path, {"worker": 2, "router": 2, "gateway": 2}, OLD) as running:
        yield running


async def _protocols(mesh: FormulaMesh) -> dict[str, str]:
    """What each process speaks."""
    found = {}
    for process in mesh.processes():
        port = process.ports.get("admin") or process.ports.get("internal")
        if port is not None:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                status = await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest())
                found[process.name] = status.protocol
    return found


def _sound(load: Load, at_least: int) -> None:
    assert not load.failures, "\n".join(load.failures)
    assert load.done.total() >= at_least
    assert len(load.done) >= 5, f"not every kind of request was tried: {load.done}"


@pytest.mark.timeout(150)
async def test_a_mesh_is_upgraded_process_by_process_under_load_and_no_request_fails(mesh: FormulaMesh) -> None:
    lives = {process.name: process.pid for process in mesh.processes()}
    async with mesh.channel() as channel:
        mesh.speak(FIRST, NEW)
        async with Load(channel, mesh.key, 1).offered(RATE) as load:
            await mesh.roll(*FIRST)
        _sound(load, 40)
        moved = load.moved
        await _half_and_half(mesh)
        mesh.speak(SECOND, NEW)
        async with Load(channel, mesh.key, 2).offered(RATE) as load:
            await mesh.roll(*SECOND)
        _sound(load, 40)
    assert moved + load.moved > 0, "no resumable stream went from one gateway to another"
    assert set((await _protocols(mesh)).values()) == {PROTOCOL.text}
    for process in mesh.processes():
        assert process.restarts == 0, f"{process.name} counts as crashed"
        if process.role not in ("supervisor", "redis"):
            assert process.pid != lives[process.name], f"{process.name} was not restarted"
    await assert_nothing_left(mesh)


async def _half_and_half(mesh: FormulaMesh) -> None:
    """Both minors in every role: each pair of neighbours is in use, and only the newer gateway asks for what is new."""
    spoken = await _protocols(mesh)
    assert spoken == {name: f"1.{NEW if name in FIRST else OLD}" for name in spoken}
    async with mesh.channel("gateway-1") as newer, mesh.channel("gateway-2") as older:
        loads = [Load(newer, mesh.key, 3, logprobs=True), Load(older, mesh.key, 4)]
        async with loads[0].offered(RATE), loads[1].offered(RATE):
            await asyncio.sleep(5.0)
        for load in loads:
            _sound(load, 15)
        asked = pb.GenerationSpec(model=MODEL, prompt="a", max_tokens=1)
        asked.sampling.logprobs = 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await inference_pb2_grpc.InferenceServiceStub(older).Complete(
                pb.CompleteRequest(spec=asked), metadata=(("authorization", f"Bearer {mesh.key}"),)
            )
        assert from_rpc(refused.value).reason is Reason.FEATURE_OFF
    routers = [await asyncio.to_thread(mesh.metrics, process) for process in mesh.processes("router")]
    assert sum(samples["trunkline_router_returned_total"] for samples in routers) > 0, "no worker lacked the feature"
    workers = [await asyncio.to_thread(mesh.metrics, process) for process in mesh.processes("worker")]
    assert all(sum(v for k, v in samples.items() if k.endswith("_submissions_total")) for samples in workers)
