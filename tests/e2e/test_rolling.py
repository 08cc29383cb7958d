"""Every process of a mesh is restarted under load, from one protocol minor to the next, and no request fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
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
RATE = 8.0


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
    assert len(load.done) >= 4, f"not every kind of request was tried: {load.done}"


@pytest.mark.timeout(240)
async def test_a_mesh_is_upgraded_process_by_process_under_load_and_no_request_fails(
    mesh: FormulaMesh, tmp_path: Path
) -> None:
    lives = {process.name: process.pid for process in mesh.processes()}
    async with mesh.channel() as channel:
        await _upgrade(mesh, channel, FIRST)
        await _half_and_half(mesh)
        await _upgrade(mesh, channel, SECOND)
    assert set((await _protocols(mesh)).values()) == {PROTOCOL.text}
    for process in mesh.processes():
        assert process.restarts == 0, f"{process.name} counts as crashed"
        if process.role not in ("supervisor", "redis"):
            assert process.pid != lives[process.name], f"{process.name} was not restarted"
    await assert_nothing_left(mesh)
    faults = [line for log in sorted((tmp_path / "logs").iterdir()) for line in log.read_text().splitlines()
              if "Traceback" in line or '"level":"error"' in line]  # fmt: skip
    assert not faults, "\n".join(faults)


async def _upgrade(mesh: FormulaMesh, channel: grpc.aio.Channel, names: Sequence[str]) -> None:
    """Restarts worker, router and gateway; long streams are under way at the gateway when its turn comes."""
    mesh.speak(names, NEW)
    *behind, gateway = names
    async with (
        mesh.channel(gateway) as leaving,
        Load(channel, mesh.key, 2 if names is SECOND else 1).offered(RATE) as load,
    ):
        await mesh.roll(*behind)
        await load.begin_long(leaving, 3)
        await mesh.roll(gateway)
    _sound(load, 40)
    assert load.moved >= 3, "resumable streams did not go from one gateway to another"


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
