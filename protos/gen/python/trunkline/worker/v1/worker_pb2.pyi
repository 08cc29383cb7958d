from trunkline.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_UNSPECIFIED: _ClassVar[Lane]
    LANE_TOKENS: _ClassVar[Lane]
    LANE_BULK: _ClassVar[Lane]
LANE_UNSPECIFIED: Lane
LANE_TOKENS: Lane
LANE_BULK: Lane

class Submission(_message.Message):
    __slots__ = ("request_id", "epoch", "attempt", "gateway_id", "gateway_incarnation", "generate", "encode", "spec_hash", "artefact_hash", "tokenizer_hash", "adapter_hash", "required_features", "budget_ms", "priority", "cache_scope", "traceparent", "tracestate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    SPEC_HASH_FIELD_NUMBER: _ClassVar[int]
    ARTEFACT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_HASH_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    epoch: int
    attempt: int
    gateway_id: str
    gateway_incarnation: int
    generate: GenerateWork
    encode: EncodeWork
    spec_hash: bytes
    artefact_hash: str
    tokenizer_hash: str
    adapter_hash: str
    required_features: _containers.RepeatedScalarFieldContainer[str]
    budget_ms: int
    priority: int
    cache_scope: bytes
    traceparent: str
    tracestate: str
    def __init__(self, request_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., gateway_id: _Optional[str] = ..., gateway_incarnation: _Optional[int] = ..., generate: _Optional[_Union[GenerateWork, _Mapping]] = ..., encode: _Optional[_Union[EncodeWork, _Mapping]] = ..., spec_hash: _Optional[bytes] = ..., artefact_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., adapter_hash: _Optional[str] = ..., required_features: _Optional[_Iterable[str]] = ..., budget_ms: _Optional[int] = ..., priority: _Optional[int] = ..., cache_scope: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class GenerateWork(_message.Message):
    __slots__ = ("prompt", "choices", "sampling", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceProgress]
    sampling: _common_pb2.Sampling
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[_Union[ChoiceProgress, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class ChoiceProgress(_message.Message):
    __slots__ = ("index", "emitted", "finish")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    index: int
    emitted: _containers.RepeatedScalarFieldContainer[int]
    finish: _common_pb2.FinishReason
    def __init__(self, index: _Optional[int] = ..., emitted: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ...) -> None: ...

class EncodeWork(_message.Message):
    __slots__ = ("inputs", "normalize")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[TokenList]
    normalize: bool
    def __init__(self, inputs: _Optional[_Iterable[_Union[TokenList, _Mapping]]] = ..., normalize: _Optional[bool] = ...) -> None: ...

class TokenList(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SubmitBatchRequest(_message.Message):
    __slots__ = ("router_id", "router_incarnation", "batch_seq", "items")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_SEQ_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_incarnation: int
    batch_seq: int
    items: _containers.RepeatedCompositeFieldContainer[Submission]
    def __init__(self, router_id: _Optional[str] = ..., router_incarnation: _Optional[int] = ..., batch_seq: _Optional[int] = ..., items: _Optional[_Iterable[_Union[Submission, _Mapping]]] = ...) -> None: ...

class SubmitBatchResponse(_message.Message):
    __slots__ = ("incarnation", "results")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    def __init__(self, incarnation: _Optional[int] = ..., results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ...) -> None: ...

class ItemResult(_message.Message):
    __slots__ = ("admitted", "rejected", "mismatch", "fenced")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    rejected: Rejected
    mismatch: Mismatch
    fenced: Fenced
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., mismatch: _Optional[_Union[Mismatch, _Mapping]] = ..., fenced: _Optional[_Union[Fenced, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("adopted",)
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    adopted: bool
    def __init__(self, adopted: _Optional[bool] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("load", "message", "draining")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    load: _common_pb2.Load
    message: str
    draining: bool
    def __init__(self, load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., message: _Optional[str] = ..., draining: _Optional[bool] = ...) -> None: ...

class Mismatch(_message.Message):
    __slots__ = ("what", "message")
    class What(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WHAT_UNSPECIFIED: _ClassVar[Mismatch.What]
        WHAT_ARTEFACT: _ClassVar[Mismatch.What]
        WHAT_TOKENIZER: _ClassVar[Mismatch.What]
        WHAT_ADAPTER: _ClassVar[Mismatch.What]
        WHAT_FEATURE: _ClassVar[Mismatch.What]
        WHAT_TOO_LARGE: _ClassVar[Mismatch.What]
        WHAT_MALFORMED: _ClassVar[Mismatch.What]
    WHAT_UNSPECIFIED: Mismatch.What
    WHAT_ARTEFACT: Mismatch.What
    WHAT_TOKENIZER: Mismatch.What
    WHAT_ADAPTER: Mismatch.What
    WHAT_FEATURE: Mismatch.What
    WHAT_TOO_LARGE: Mismatch.What
    WHAT_MALFORMED: Mismatch.What
    WHAT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    what: Mismatch.What
    message: str
    def __init__(self, what: _Optional[_Union[Mismatch.What, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Fenced(_message.Message):
    __slots__ = ("epoch", "attempt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempt: int
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "build", "id", "incarnation", "stream_generation", "features", "heartbeat_ms", "max_message_bytes", "lane", "held", "pending")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STREAM_GENERATION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    build: str
    id: str
    incarnation: int
    stream_generation: int
    features: _containers.RepeatedScalarFieldContainer[str]
    heartbeat_ms: int
    max_message_bytes: int
    lane: Lane
    held: _containers.RepeatedCompositeFieldContainer[Held]
    pending: _containers.RepeatedCompositeFieldContainer[Pending]
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., build: _Optional[str] = ..., id: _Optional[str] = ..., incarnation: _Optional[int] = ..., stream_generation: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., heartbeat_ms: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., lane: _Optional[_Union[Lane, str]] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., pending: _Optional[_Iterable[_Union[Pending, _Mapping]]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("request_id", "epoch", "attempt", "next")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    epoch: int
    attempt: int
    next: _containers.RepeatedCompositeFieldContainer[NextIndex]
    def __init__(self, request_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., next: _Optional[_Iterable[_Union[NextIndex, _Mapping]]] = ...) -> None: ...

class NextIndex(_message.Message):
    __slots__ = ("choice", "index")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    choice: int
    index: int
    def __init__(self, choice: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Pending(_message.Message):
    __slots__ = ("request_id", "epoch", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    epoch: int
    attempt: int
    def __init__(self, request_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class OutputsRequest(_message.Message):
    __slots__ = ("hello", "ack", "cancel", "stop", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ack: Ack
    cancel: CancelOutput
    stop: StopOutput
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., cancel: _Optional[_Union[CancelOutput, _Mapping]] = ..., stop: _Optional[_Union[StopOutput, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class CancelOutput(_message.Message):
    __slots__ = ("request_id", "epoch", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    epoch: int
    attempt: int
    def __init__(self, request_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class StopOutput(_message.Message):
    __slots__ = ("request_id", "epoch", "attempt", "choice", "at_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    AT_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    epoch: int
    attempt: int
    choice: int
    at_index: int
    def __init__(self, request_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., at_index: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OutputsResponse(_message.Message):
    __slots__ = ("hello", "batch", "heartbeat", "bulk")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    batch: OutputBatch
    heartbeat: WorkerHeartbeat
    bulk: BulkPiece
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., batch: _Optional[_Union[OutputBatch, _Mapping]] = ..., heartbeat: _Optional[_Union[WorkerHeartbeat, _Mapping]] = ..., bulk: _Optional[_Union[BulkPiece, _Mapping]] = ...) -> None: ...

class WorkerHeartbeat(_message.Message):
    __slots__ = ("engine_tick_age_ms", "step")
    ENGINE_TICK_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    engine_tick_age_ms: int
    step: int
    def __init__(self, engine_tick_age_ms: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class OutputBatch(_message.Message):
    __slots__ = ("seq", "opened", "handle", "choice", "index", "count", "finish", "token_ids", "stop_token", "logprobs", "events")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    opened: _containers.RepeatedCompositeFieldContainer[Opened]
    handle: _containers.RepeatedScalarFieldContainer[int]
    choice: _containers.RepeatedScalarFieldContainer[int]
    index: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    finish: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[RunLogprobs]
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    def __init__(self, seq: _Optional[int] = ..., opened: _Optional[_Iterable[_Union[Opened, _Mapping]]] = ..., handle: _Optional[_Iterable[int]] = ..., choice: _Optional[_Iterable[int]] = ..., index: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., finish: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., stop_token: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[RunLogprobs, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("request_id", "epoch", "attempt", "handle", "admit_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ADMIT_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    epoch: int
    attempt: int
    handle: int
    admit_ms: float
    def __init__(self, request_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., handle: _Optional[int] = ..., admit_ms: _Optional[float] = ...) -> None: ...

class RunLogprobs(_message.Message):
    __slots__ = ("run", "tokens")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    run: int
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, run: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("handle", "request_id", "finished", "failed", "released", "freed", "fenced", "scheduled")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: bytes
    finished: Finished
    failed: Failed
    released: Released
    freed: Freed
    fenced: FencedOut
    scheduled: Scheduled
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[bytes] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., freed: _Optional[_Union[Freed, _Mapping]] = ..., fenced: _Optional[_Union[FencedOut, _Mapping]] = ..., scheduled: _Optional[_Union[Scheduled, _Mapping]] = ...) -> None: ...

class Scheduled(_message.Message):
    __slots__ = ("worker_queue_ms", "cached_tokens")
    WORKER_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_queue_ms: float
    cached_tokens: int
    def __init__(self, worker_queue_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("worker_queue_ms", "prefill_ms", "decode_ms", "steps", "cached_tokens", "preemptions")
    WORKER_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    worker_queue_ms: float
    prefill_ms: float
    decode_ms: float
    steps: int
    cached_tokens: int
    preemptions: int
    def __init__(self, worker_queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., steps: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason", "message", "retryable", "work_done")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    WORK_DONE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    retryable: bool
    work_done: bool
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., work_done: _Optional[bool] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("why", "message")
    class Why(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WHY_UNSPECIFIED: _ClassVar[Released.Why]
        WHY_DRAINING: _ClassVar[Released.Why]
        WHY_GROUP_FAILED: _ClassVar[Released.Why]
        WHY_OVERLOADED: _ClassVar[Released.Why]
    WHY_UNSPECIFIED: Released.Why
    WHY_DRAINING: Released.Why
    WHY_GROUP_FAILED: Released.Why
    WHY_OVERLOADED: Released.Why
    WHY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    why: Released.Why
    message: str
    def __init__(self, why: _Optional[_Union[Released.Why, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Freed(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class FencedOut(_message.Message):
    __slots__ = ("epoch", "attempt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempt: int
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class BulkPiece(_message.Message):
    __slots__ = ("seq", "handle", "kind", "offset", "total", "data", "prompt_tokens")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[BulkPiece.Kind]
        KIND_EMBEDDING: _ClassVar[BulkPiece.Kind]
        KIND_SCORES: _ClassVar[BulkPiece.Kind]
        KIND_PROMPT_LOGPROBS: _ClassVar[BulkPiece.Kind]
    KIND_UNSPECIFIED: BulkPiece.Kind
    KIND_EMBEDDING: BulkPiece.Kind
    KIND_SCORES: BulkPiece.Kind
    KIND_PROMPT_LOGPROBS: BulkPiece.Kind
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    handle: int
    kind: BulkPiece.Kind
    offset: int
    total: int
    data: bytes
    prompt_tokens: int
    def __init__(self, seq: _Optional[int] = ..., handle: _Optional[int] = ..., kind: _Optional[_Union[BulkPiece.Kind, str]] = ..., offset: _Optional[int] = ..., total: _Optional[int] = ..., data: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("router_id", "router_incarnation", "protocol_major", "protocol_minor")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_incarnation: int
    protocol_major: int
    protocol_minor: int
    def __init__(self, router_id: _Optional[str] = ..., router_incarnation: _Optional[int] = ..., protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "loads", "echo_batch_seq", "engine_tick_age_ms", "oldest_waiting_ms", "max_step_ms", "heartbeat_ms", "draining", "adapters", "versions")
    class AdaptersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    ECHO_BATCH_SEQ_FIELD_NUMBER: _ClassVar[int]
    ENGINE_TICK_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    loads: _containers.RepeatedCompositeFieldContainer[_common_pb2.Load]
    echo_batch_seq: int
    engine_tick_age_ms: int
    oldest_waiting_ms: int
    max_step_ms: int
    heartbeat_ms: int
    draining: bool
    adapters: _containers.ScalarMap[str, str]
    versions: _containers.RepeatedCompositeFieldContainer[_common_pb2.ModelVersion]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., loads: _Optional[_Iterable[_Union[_common_pb2.Load, _Mapping]]] = ..., echo_batch_seq: _Optional[int] = ..., engine_tick_age_ms: _Optional[int] = ..., oldest_waiting_ms: _Optional[int] = ..., max_step_ms: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., draining: _Optional[bool] = ..., adapters: _Optional[_Mapping[str, str]] = ..., versions: _Optional[_Iterable[_Union[_common_pb2.ModelVersion, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    epoch: int
    attempt: int
    def __init__(self, request_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "build", "protocol_major", "protocol_minor", "versions", "features", "kernel_mode", "numeric_path", "device", "tensor_parallel_size", "pipeline_parallel_size", "kv_tokens", "max_requests")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    KERNEL_MODE_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_PATH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    build: str
    protocol_major: int
    protocol_minor: int
    versions: _containers.RepeatedCompositeFieldContainer[_common_pb2.ModelVersion]
    features: _containers.RepeatedScalarFieldContainer[str]
    kernel_mode: str
    numeric_path: str
    device: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    kv_tokens: int
    max_requests: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., build: _Optional[str] = ..., protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[_common_pb2.ModelVersion, _Mapping]]] = ..., features: _Optional[_Iterable[str]] = ..., kernel_mode: _Optional[str] = ..., numeric_path: _Optional[str] = ..., device: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., max_requests: _Optional[int] = ...) -> None: ...

class GetAssetRequest(_message.Message):
    __slots__ = ("sha256", "offset", "max_bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    offset: int
    max_bytes: int
    def __init__(self, sha256: _Optional[str] = ..., offset: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class GetAssetResponse(_message.Message):
    __slots__ = ("data", "total")
    DATA_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    total: int
    def __init__(self, data: _Optional[bytes] = ..., total: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_ms", "release")
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    release: bool
    def __init__(self, grace_ms: _Optional[int] = ..., release: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
