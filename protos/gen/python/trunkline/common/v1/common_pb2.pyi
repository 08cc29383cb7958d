from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_QUEUED: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_FINISHED: _ClassVar[RequestState]
    REQUEST_STATE_FAILED: _ClassVar[RequestState]
    REQUEST_STATE_CANCELLED: _ClassVar[RequestState]
    REQUEST_STATE_EXPIRED: _ClassVar[RequestState]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_QUEUED: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_FINISHED: RequestState
REQUEST_STATE_FAILED: RequestState
REQUEST_STATE_CANCELLED: RequestState
REQUEST_STATE_EXPIRED: RequestState

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("chosen", "top_ids", "top_logprobs")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    chosen: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("total_ms", "admit_ms", "tokenise_ms", "router_queue_ms", "dispatch_ms", "worker_queue_ms", "prefill_ms", "decode_ms", "detokenise_ms", "client_wait_ms", "lost_attempts_ms", "unattributed_ms", "steps", "attempts", "migrations", "worker", "trace_id")
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENISE_MS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_MS_FIELD_NUMBER: _ClassVar[int]
    WORKER_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    DETOKENISE_MS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    LOST_ATTEMPTS_MS_FIELD_NUMBER: _ClassVar[int]
    UNATTRIBUTED_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    total_ms: float
    admit_ms: float
    tokenise_ms: float
    router_queue_ms: float
    dispatch_ms: float
    worker_queue_ms: float
    prefill_ms: float
    decode_ms: float
    detokenise_ms: float
    client_wait_ms: float
    lost_attempts_ms: float
    unattributed_ms: float
    steps: int
    attempts: int
    migrations: int
    worker: str
    trace_id: str
    def __init__(self, total_ms: _Optional[float] = ..., admit_ms: _Optional[float] = ..., tokenise_ms: _Optional[float] = ..., router_queue_ms: _Optional[float] = ..., dispatch_ms: _Optional[float] = ..., worker_queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., detokenise_ms: _Optional[float] = ..., client_wait_ms: _Optional[float] = ..., lost_attempts_ms: _Optional[float] = ..., unattributed_ms: _Optional[float] = ..., steps: _Optional[int] = ..., attempts: _Optional[int] = ..., migrations: _Optional[int] = ..., worker: _Optional[str] = ..., trace_id: _Optional[str] = ...) -> None: ...

class RequestRecord(_message.Message):
    __slots__ = ("request_id", "tenant", "model", "version", "state", "gateway_id", "worker_id", "epoch", "attempt", "usage", "reason", "trace_id", "accepted_at_ms", "ended_at_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    model: str
    version: str
    state: RequestState
    gateway_id: str
    worker_id: str
    epoch: int
    attempt: int
    usage: Usage
    reason: str
    trace_id: str
    accepted_at_ms: int
    ended_at_ms: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., gateway_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., reason: _Optional[str] = ..., trace_id: _Optional[str] = ..., accepted_at_ms: _Optional[int] = ..., ended_at_ms: _Optional[int] = ...) -> None: ...

class ModelVersion(_message.Message):
    __slots__ = ("model", "version", "artefact_hash", "tokenizer_hash", "assets", "max_context", "vocab_size", "eos_token_ids", "embedding_size", "features", "weight", "ready_replicas", "architecture", "numeric_path")
    class AssetsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARTEFACT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    ASSETS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    READY_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_PATH_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    artefact_hash: str
    tokenizer_hash: str
    assets: _containers.ScalarMap[str, str]
    max_context: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    embedding_size: int
    features: _containers.RepeatedScalarFieldContainer[str]
    weight: float
    ready_replicas: int
    architecture: str
    numeric_path: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., artefact_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., assets: _Optional[_Mapping[str, str]] = ..., max_context: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., embedding_size: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., weight: _Optional[float] = ..., ready_replicas: _Optional[int] = ..., architecture: _Optional[str] = ..., numeric_path: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("artefact_hash", "running", "waiting", "queued_prefill_tokens", "kv_tokens_free", "kv_tokens_cached", "kv_tokens_total", "kv_tokens_reserved", "requests", "max_requests")
    ARTEFACT_HASH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    artefact_hash: str
    running: int
    waiting: int
    queued_prefill_tokens: int
    kv_tokens_free: int
    kv_tokens_cached: int
    kv_tokens_total: int
    kv_tokens_reserved: int
    requests: int
    max_requests: int
    def __init__(self, artefact_hash: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., kv_tokens_free: _Optional[int] = ..., kv_tokens_cached: _Optional[int] = ..., kv_tokens_total: _Optional[int] = ..., kv_tokens_reserved: _Optional[int] = ..., requests: _Optional[int] = ..., max_requests: _Optional[int] = ...) -> None: ...
