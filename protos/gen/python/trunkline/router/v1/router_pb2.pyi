from trunkline.common.v1 import common_pb2 as _common_pb2
from trunkline.worker.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubmitRequest(_message.Message):
    __slots__ = ("submission", "tenant", "model", "session_key", "prefix_hashes", "excluded", "preferred", "kv_tokens", "prefill_tokens")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    submission: _worker_pb2.Submission
    tenant: str
    model: str
    session_key: bytes
    prefix_hashes: bytes
    excluded: _containers.RepeatedScalarFieldContainer[int]
    preferred: _containers.RepeatedScalarFieldContainer[int]
    kv_tokens: int
    prefill_tokens: int
    def __init__(self, submission: _Optional[_Union[_worker_pb2.Submission, _Mapping]] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., session_key: _Optional[bytes] = ..., prefix_hashes: _Optional[bytes] = ..., excluded: _Optional[_Iterable[int]] = ..., preferred: _Optional[_Iterable[int]] = ..., kv_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("incarnation", "worker_id", "address", "queue_ms", "dispatch_ms")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_MS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    worker_id: str
    address: str
    queue_ms: float
    dispatch_ms: float
    def __init__(self, incarnation: _Optional[int] = ..., worker_id: _Optional[str] = ..., address: _Optional[str] = ..., queue_ms: _Optional[float] = ..., dispatch_ms: _Optional[float] = ...) -> None: ...

class WatchModelsRequest(_message.Message):
    __slots__ = ("gateway_id", "gateway_incarnation", "protocol_major", "protocol_minor")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    gateway_incarnation: int
    protocol_major: int
    protocol_minor: int
    def __init__(self, gateway_id: _Optional[str] = ..., gateway_incarnation: _Optional[int] = ..., protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ...) -> None: ...

class WatchModelsResponse(_message.Message):
    __slots__ = ("router_id", "router_incarnation", "versions", "heartbeat", "heartbeat_ms", "draining")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_incarnation: int
    versions: _containers.RepeatedCompositeFieldContainer[_common_pb2.ModelVersion]
    heartbeat: bool
    heartbeat_ms: int
    draining: bool
    def __init__(self, router_id: _Optional[str] = ..., router_incarnation: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[_common_pb2.ModelVersion, _Mapping]]] = ..., heartbeat: _Optional[bool] = ..., heartbeat_ms: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class GetAssetRequest(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    def __init__(self, sha256: _Optional[str] = ...) -> None: ...

class GetAssetResponse(_message.Message):
    __slots__ = ("data", "total")
    DATA_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    total: int
    def __init__(self, data: _Optional[bytes] = ..., total: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    def __init__(self, request_id: _Optional[bytes] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("queued", "position", "queue_length")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    queued: bool
    position: int
    queue_length: int
    def __init__(self, queued: _Optional[bool] = ..., position: _Optional[int] = ..., queue_length: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: SubmitRequest
    def __init__(self, request: _Optional[_Union[SubmitRequest, _Mapping]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("candidates", "chosen")
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    chosen: str
    def __init__(self, candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., chosen: _Optional[str] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("worker_id", "incarnation", "filtered_by", "scores", "total")
    class ScoresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FILTERED_BY_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    filtered_by: str
    scores: _containers.ScalarMap[str, float]
    total: float
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., filtered_by: _Optional[str] = ..., scores: _Optional[_Mapping[str, float]] = ..., total: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_ms",)
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    def __init__(self, grace_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
