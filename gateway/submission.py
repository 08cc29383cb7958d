"""What is submitted: a prepared request as a SubmitRequest. Pure.

The one rule: what changes tokens is set here once, before attempt 1; later attempts add only what was emitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from shared import wire
from shared.ids import Identity
from trunkline.common.v1 import common_pb2
from trunkline.router.v1 import router_pb2
from trunkline.worker.v1 import worker_pb2

_HINT_BYTES = 16  # of each prefix hash
_MAX_HINTS = 1024  # blocks: a hint for routing need not reach further


@dataclass(frozen=True)
class Sender:
    """Who submits, for whom."""

    identity: Identity
    request_id: bytes
    tenant: str
    priority: int = 0
    session_id: str = ""
    cache_salt: str = ""


def generation(
    sender: Sender,
    version: common_pb2.ModelVersion,
    work: worker_pb2.GenerateWork,
    prompt: list[int],
) -> router_pb2.SubmitRequest:
    """The submission of a generation; `work` holds sampling, limits, and choices by index."""
    features = ["generate", "logprobs"] if work.sampling.HasField("logprobs") else ["generate"]
    request = _request(sender, version, features)
    request.submission.generate.CopyFrom(work)
    request.submission.generate.prompt.extend(prompt)
    scope = request.submission.cache_scope
    hashes = wire.prefix_hashes(scope, prompt[: _MAX_HINTS * wire.BLOCK_TOKENS])
    request.prefix_hashes = b"".join(link[:_HINT_BYTES] for link in hashes)
    request.session_key = _session_key(sender, hashes, scope)
    request.kv_tokens = len(prompt) + len(work.choices) * work.max_tokens
    request.prefill_tokens = len(prompt)
    request.submission.spec_hash = wire.spec_hash(request.submission, prompt)
    return request


def embedding(
    sender: Sender, version: common_pb2.ModelVersion, inputs: Sequence[Sequence[int]], normalize: bool
) -> router_pb2.SubmitRequest:
    """The submission of texts to embed."""
    request = _request(sender, version, ["encode"])
    work = request.submission.encode
    work.normalize = normalize
    for ids in inputs:
        work.inputs.add(ids=ids)
    request.session_key = _session_key(sender, [], request.submission.cache_scope)
    request.prefill_tokens = request.kv_tokens = sum(map(len, inputs))
    request.submission.spec_hash = wire.spec_hash(request.submission)
    return request


def _request(sender: Sender, version: common_pb2.ModelVersion, features: list[str]) -> router_pb2.SubmitRequest:
    scope = wire.cache_scope(
        artefact_hash=version.artefact_hash,
        adapter_hash="",
        kv_dtype="",
        encoder_sha=b"",
        share_group=sender.tenant,
        salt=sender.cache_salt,
    )
    submission = worker_pb2.Submission(
        request_id=sender.request_id,
        gateway_id=sender.identity.id,
        gateway_incarnation=sender.identity.incarnation,
        artefact_hash=version.artefact_hash,
        tokenizer_hash=version.tokenizer_hash,
        required_features=features,
        priority=sender.priority,
        cache_scope=scope,
    )
    return router_pb2.SubmitRequest(submission=submission, tenant=sender.tenant, model=version.model)


def _session_key(sender: Sender, hashes: list[bytes], scope: bytes) -> bytes:
    """The client's session, else tenant and first prefix block."""
    if sender.session_id:
        return session_key(sender.tenant, sender.session_id)
    return session_key(sender.tenant, (hashes[0] if hashes else scope).hex())


def session_key(tenant: str, session: str) -> bytes:
    """16 bytes naming a session of a tenant."""
    return hashlib.sha256(f"{len(tenant)}:{tenant}{session}".encode()).digest()[:16]
