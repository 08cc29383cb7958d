"""`buf curl` over reflection against a running gateway: any tool can talk to the mesh without our protos."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

from tests.e2e.harness import MODEL, Mesh

SERVICE = "trunkline.inference.v1.InferenceService"


async def _curl(mesh: Mesh, method: str, body: object, *, key: bool = True) -> list[dict[str, object]]:
    buf = shutil.which("buf") or str(Path(sys.executable).with_name("buf"))
    headers = ["--header", f"authorization: Bearer {mesh.key}"] if key else []
    process = await asyncio.create_subprocess_exec(
        buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *headers, "--data", json.dumps(body),
        f"http://{mesh.grpc_addresses()[0]}/{method}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return _documents(out.decode())


def _documents(text: str) -> list[dict[str, object]]:
    decoder, found, at = json.JSONDecoder(), [], 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        document, at = decoder.raw_decode(text, at)
        found.append(document)
    return found


async def test_models_are_listed(mesh: Mesh) -> None:
    (answer,) = await _curl(mesh, f"{SERVICE}/ListModels", {})
    assert [model["name"] for model in answer["models"]] == [MODEL]  # type: ignore[index,attr-defined]


async def test_a_completion_is_answered(mesh: Mesh) -> None:
    body = {
        "spec": {"model": MODEL, "prompt": "The capital of France is", "maxTokens": 3, "sampling": {"temperature": 0}}
    }
    (answer,) = await _curl(mesh, f"{SERVICE}/Complete", body)
    assert answer["choices"][0]["text"].startswith(" Paris")  # type: ignore[index]


async def test_a_generation_is_streamed_from_started_to_finished(mesh: Mesh) -> None:
    body = {
        "spec": {"model": MODEL, "prompt": "The capital of France is", "maxTokens": 8, "sampling": {"temperature": 0}}
    }
    events = await _curl(mesh, f"{SERVICE}/Generate", body)
    kinds = [next(iter(event)) for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"delta"}
    assert "".join(event["delta"].get("text", "") for event in events[1:-1]).startswith(" Paris")  # type: ignore[attr-defined]


async def test_health_is_served_for_the_process_the_service_and_the_model(mesh: Mesh) -> None:
    for name in ("", SERVICE, f"model/{MODEL}"):
        (answer,) = await _curl(mesh, "grpc.health.v1.Health/Check", {"service": name}, key=False)
        assert answer == {"status": "SERVING"}
