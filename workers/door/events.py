"""The events of the Outputs stream, one maker each; handles and ids are filled in where they are sent."""

from __future__ import annotations

from shared.errors import MAX_MESSAGE_CHARS, Reason
from shared.wire import Stamp
from trunkline.worker.v1 import worker_pb2
from workers.engine import messages as m

Why = worker_pb2.Released.Why


def scheduled(event: m.Scheduled) -> worker_pb2.RequestEvent:
    """The engine took it into its first step."""
    return worker_pb2.RequestEvent(
        scheduled=worker_pb2.Scheduled(worker_queue_ms=event.queue_ms, cached_tokens=event.cached_tokens)
    )


def finished(event: m.Finished) -> worker_pb2.RequestEvent:
    """All choices ended."""
    return worker_pb2.RequestEvent(
        finished=worker_pb2.Finished(
            worker_queue_ms=event.queue_ms,
            prefill_ms=event.prefill_ms,
            decode_ms=event.decode_ms,
            steps=event.steps,
            cached_tokens=event.cached_tokens,
            preemptions=event.preemptions,
        )
    )


def failed(reason: Reason, message: str, *, retryable: bool, work_done: bool) -> worker_pb2.RequestEvent:
    """It ended with an error."""
    return worker_pb2.RequestEvent(
        failed=worker_pb2.Failed(
            reason=reason.value, message=message[:MAX_MESSAGE_CHARS], retryable=retryable, work_done=work_done
        )
    )


def released(why: Why, message: str) -> worker_pb2.RequestEvent:
    """The worker holds it no longer."""
    return worker_pb2.RequestEvent(released=worker_pb2.Released(why=why, message=message[:MAX_MESSAGE_CHARS]))


def freed(step: int) -> worker_pb2.RequestEvent:
    """The engine holds nothing for it, as of `step`."""
    return worker_pb2.RequestEvent(freed=worker_pb2.Freed(step=step))


def fenced_out(stamp: Stamp) -> worker_pb2.RequestEvent:
    """A higher (e, a) took it over."""
    return worker_pb2.RequestEvent(fenced=worker_pb2.FencedOut(epoch=stamp[0], attempt=stamp[1]))
