"""Bad input and faults against the running mesh: each gets its typed error, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.e2e.harness import MODEL, Client, Mesh, clients, spec, to_its_end, trunkctl
from tests.e2e.leaks import assert_nothing_left
from trunkline.inference.v1 import inference_pb2

Code = grpc.StatusCode


async def _refused(
    client: Client, request: inference_pb2.GenerationSpec, key: str | None = None
) -> grpc.aio.AioRpcError:
    metadata = client.metadata if key is None else (("authorization", f"Bearer {key}"),)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.stub.Complete(inference_pb2.CompleteRequest(spec=request), metadata=metadata, timeout=60)
    return caught.value


def _reason(error: grpc.aio.AioRpcError) -> str:
    """The one ErrorInfo that every error carries."""
    status = rpc_status.from_call(error)
    assert status is not None, f"{error.code()} without details: {error.details()}"
    infos = [detail for detail in status.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    assert len(infos) == 1
    info = error_details_pb2.ErrorInfo()
    infos[0].Unpack(info)
    assert info.domain == "trunkline"
    return info.reason


BAD_SPECS = [
    ("an empty prompt", spec("", 4), Code.INVALID_ARGUMENT, "BAD_FIELD"),
    ("no input at all", inference_pb2.GenerationSpec(model=MODEL), Code.INVALID_ARGUMENT, "BAD_FIELD"),
    ("a token beyond the vocabulary", spec([1, 49152], 4), Code.INVALID_ARGUMENT, "BAD_FIELD"),
    ("a prompt beyond the context", spec([5] * 8200, 4), Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG"),
    ("an unknown model", inference_pb2.GenerationSpec(model="gpt-9", prompt="x"), Code.NOT_FOUND, "MODEL_UNKNOWN"),
    ("a resume window without end", spec("x", 4, resume_window_ms=1 << 40), Code.INVALID_ARGUMENT, "BAD_FIELD"),
]


@pytest.mark.parametrize(
    ("request_", "code", "reason"), [row[1:] for row in BAD_SPECS], ids=[row[0] for row in BAD_SPECS]
)
async def test_bad_requests_get_their_typed_error(
    mesh: Mesh, request_: inference_pb2.GenerationSpec, code: grpc.StatusCode, reason: str
) -> None:
    async with clients(mesh) as opened:
        error = await _refused(opened[0], request_)
    assert (error.code(), _reason(error)) == (code, reason)


async def test_several_bad_parameters_are_all_named_at_once(mesh: Mesh) -> None:
    bad = spec("x", 4, min_tokens=9, n=99)
    bad.sampling.temperature, bad.sampling.top_p = -1.0, 3.0
    async with clients(mesh) as opened:
        error = await _refused(opened[0], bad)
    status = rpc_status.from_call(error)
    assert status is not None
    violations = error_details_pb2.BadRequest()
    assert any(detail.Unpack(violations) for detail in status.details)
    fields = " ".join(violation.field for violation in violations.field_violations)
    assert all(name in fields for name in ("temperature", "top_p", "min_tokens", "n"))


async def test_a_huge_body_is_refused_on_both_faces(mesh: Mesh) -> None:
    async with clients(mesh) as opened:
        error = await _refused(opened[0], spec("x" * (9 << 20), 4))
    assert error.code() in (Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT)
    status, body = await asyncio.to_thread(
        _post, mesh, json.dumps({"model": MODEL, "prompt": "x" * (9 << 20)}).encode()
    )
    assert status in (400, 413)
    assert "error" in body


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "\xff\xfe"}', b"[]", b'{"model": 5}'])
def test_bodies_that_are_no_request_are_refused_with_an_error_body(mesh: Mesh, body: bytes) -> None:
    status, answer = _post(mesh, body)
    assert status == 400
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"


def _post(mesh: Mesh, body: bytes) -> tuple[int, str]:
    headers = {"authorization": f"Bearer {mesh.key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{mesh.http_addresses()[0]}/v1/completions", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (ConnectionError, urllib.error.URLError):  # the server may close on a body it will not read to its end
        return 413, "error: closed"


async def test_keys_unknown_expired_and_of_the_wrong_scope_are_told_apart(mesh: Mesh) -> None:
    expired = _new_key(mesh, "--expires-in-days", "0.00001")  # about a second
    embed_only = _new_key(mesh, "--scope", "embed")
    async with clients(mesh) as opened:
        await _until_known(opened[0], embed_only)
        await asyncio.sleep(1.0)
        seen = {
            name: (error.code(), _reason(error))
            for name, key in (("unknown", "tl_nobody_nothing"), ("expired", expired), ("scope", embed_only))
            for error in [await _refused(opened[0], spec("x", 4), key)]
        }
    assert seen == {
        "unknown": (Code.UNAUTHENTICATED, "KEY_UNKNOWN"),
        "expired": (Code.UNAUTHENTICATED, "KEY_EXPIRED"),
        "scope": (Code.PERMISSION_DENIED, "SCOPE_FORBIDDEN"),
    }


def _new_key(mesh: Mesh, *options: str) -> str:
    done = trunkctl(mesh.home, "keys", "create", "--tenant", "test", *options)
    assert done.returncode == 0, done.stderr
    return next(word for word in done.stdout.split() if word.startswith("tl_"))


async def _until_known(client: Client, key: str) -> None:
    """Returns when the gateway has read the keys file that holds `key`; it looks every second."""
    async with asyncio.timeout(10):
        while True:
            try:
                await client.stub.ListModels(
                    inference_pb2.ListModelsRequest(), metadata=(("authorization", f"Bearer {key}"),), timeout=5
                )
                return
            except grpc.aio.AioRpcError as error:
                if _reason(error) != "KEY_UNKNOWN":
                    raise
            await asyncio.sleep(0.1)


async def test_deadlines_end_requests_in_prefill_and_in_decode(mesh: Mesh) -> None:
    cases = {
        "prefill": spec([7 + i % 900 for i in range(6000)], 4, deadline_ms=400),
        "decode": spec("x", 4000, deadline_ms=900, ignore_eos=True),
    }
    async with clients(mesh) as opened:
        for where, request in cases.items():
            error = await _refused(opened[0], request)
            assert error.code() is Code.DEADLINE_EXCEEDED, where
            assert _reason(error) in ("RUN_EXPIRED", "QUEUE_EXPIRED", "WOULD_MISS"), where
    await assert_nothing_left(mesh)


async def test_a_generation_can_be_looked_up_and_cancelled_through_any_gateway(mesh: Mesh) -> None:
    async with clients(mesh) as opened:
        owner, other = opened
        call = owner.stub.Generate(
            inference_pb2.GenerateRequest(spec=spec("x", 4000, ignore_eos=True, client_request_id="mine")),
            metadata=owner.metadata, timeout=60,
        )  # fmt: skip
        started = (await call.read()).started
        found = await other.stub.GetGeneration(
            inference_pb2.GetGenerationRequest(client_request_id="mine"), metadata=other.metadata, timeout=10
        )
        assert found.record.request_id == started.request_id
        done = await other.stub.CancelGeneration(
            inference_pb2.CancelGenerationRequest(request_id=started.request_id), metadata=other.metadata, timeout=10
        )
        assert done.confirmed
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await to_its_end(call)
        assert ended.value.code() is Code.CANCELLED
        foreign = _new_key(mesh)
        await _until_known(other, foreign)
        with pytest.raises(grpc.aio.AioRpcError) as hidden:
            await other.stub.GetGeneration(
                inference_pb2.GetGenerationRequest(request_id=started.request_id),
                metadata=(("authorization", f"Bearer {foreign}"),), timeout=10,
            )  # fmt: skip
        assert hidden.value.code() is Code.NOT_FOUND


async def test_embeddings_travel_the_bulk_lane(mesh: Mesh) -> None:
    texts = ["a cat", "a kitten", "stocks fell"] * 8
    inputs = [inference_pb2.EmbedInput(text=text) for text in texts]
    async with clients(mesh) as opened:
        answer = await opened[1].stub.Embed(
            inference_pb2.EmbedRequest(model=MODEL, inputs=inputs), metadata=opened[1].metadata, timeout=60
        )
    vectors = [list(embedding.values) for embedding in answer.embeddings]
    assert len(vectors) == len(texts)
    assert len(vectors[0]) == 576
    assert abs(sum(x * x for x in vectors[0]) - 1.0) < 1e-4
    assert vectors[0] == vectors[3]


def test_a_taken_port_is_named_with_its_holder(artefact_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(artefact_dir.parent)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        done = trunkctl(tmp_path, "mesh", "up", "--detach", "--http-port", str(port), timeout=60)
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "python" in done.stderr
    assert "Traceback" not in done.stderr
