"""What a router says when it does not place a submission: reasons, sentences, advice.

Owns the words. The one rule: sentences are safe for clients; incarnations travel in the metadata.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from shared.errors import Reason, TrunklineError
from shared.ids import incarnation_text
from shared.wire import Stamp
from trunkline.worker.v1 import worker_pb2

What = worker_pb2.Mismatch.What
RETRY_S: Final = 1.0  # advice where nothing better is known

# Of several workers' mismatches the one that helps most is told: what the client or the gateway can do something about.
_MISMATCHES: Final = (
    (worker_pb2.Mismatch.WHAT_TOO_LARGE, Reason.TOO_LARGE, "no replica has room for a request of this size"),
    (worker_pb2.Mismatch.WHAT_FEATURE, Reason.FEATURE_OFF, "no replica offers what the request needs"),
    (worker_pb2.Mismatch.WHAT_ADAPTER, Reason.VERSION_GONE, "no replica serves this adapter"),
    (worker_pb2.Mismatch.WHAT_TOKENIZER, Reason.VERSION_GONE, "no replica serves this tokenizer"),
    (worker_pb2.Mismatch.WHAT_ARTEFACT, Reason.VERSION_GONE, "no replica serves this version"),
)


def queue_full(subject: str, retry_after_s: float) -> TrunklineError:
    return TrunklineError(
        Reason.QUEUE_FULL, "the queue is full", metadata={"subject": subject}, retry_after_s=retry_after_s
    )


def would_miss(wait_s: float) -> TrunklineError:
    return TrunklineError(
        Reason.WOULD_MISS,
        "the deadline cannot be met: the queue is too long",
        metadata={"expected_wait_ms": str(round(wait_s * 1000))},
    )


def expired() -> TrunklineError:
    return TrunklineError(Reason.QUEUE_EXPIRED, "its time passed while the request was in the queue")


def draining() -> TrunklineError:
    return TrunklineError(Reason.DRAINING, "the router is draining", retry_after_s=0.0)


def no_replica() -> TrunklineError:
    return TrunklineError(Reason.NO_REPLICA, "no replica of the model is available", retry_after_s=RETRY_S)


def version_gone() -> TrunklineError:
    return TrunklineError(Reason.VERSION_GONE, "no replica serves this version any more")


def mismatch(whats: Collection[What]) -> TrunklineError:
    """Every replica refused it, for these reasons."""
    for what, reason, message in _MISMATCHES:
        if what in whats:
            return TrunklineError(reason, message)
    return malformed()


def malformed() -> TrunklineError:
    """A worker finds fault with the submission itself, which our own gateway made."""
    return TrunklineError(Reason.INTERNAL, "the submission is malformed")


def too_large(size: int, most: int) -> TrunklineError:
    return TrunklineError(Reason.TOO_LARGE, f"the submission has {size} bytes, more than the {most} that are taken")


def fenced(stamp: Stamp) -> TrunklineError:
    """A higher (epoch, attempt) exists."""
    return TrunklineError(
        Reason.OWNER_MOVED,
        "a later attempt or another owner has the request",
        metadata={"epoch": str(stamp[0]), "attempt": str(stamp[1])},
    )


def outcome_unknown(incarnation: int) -> TrunklineError:
    return TrunklineError(
        Reason.OUTCOME_UNKNOWN,
        "the worker may or may not have the request",
        metadata={"incarnation": incarnation_text(incarnation)},
    )
