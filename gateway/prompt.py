"""From what a client wrote to token ids: template, tokenizer, and a thread for what is long.

The one rule: a rendered chat is tokenised without special tokens, since the template wrote them; a plain text with.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from gateway.kit import Kit
from shared.errors import Reason, TrunklineError, Violation
from trunkline.inference.v1 import inference_pb2

LONG_BYTES: Final = 8 * 1024  # of text; about as many ids take as long to hash
# Few: each of them takes the interpreter lock at times, and the event loop would wait for all of them.
_THREADS: Final = ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), thread_name_prefix="prompt")
_T = TypeVar("_T")


def encode(kit: Kit, spec: inference_pb2.GenerationSpec) -> list[int]:
    """The prompt's ids. Raises BAD_FIELD."""
    match spec.WhichOneof("input"):
        case "prompt_token_ids":
            return list(spec.prompt_token_ids.ids)
        case "chat":
            return kit.tokenizer.encode(render(kit, spec.chat, spec.model), special=False)
        case _:
            return kit.tokenizer.encode(spec.prompt)


def render(kit: Kit, chat: inference_pb2.Chat, model: str) -> str:
    """The prompt's text. Raises BAD_FIELD where the model has no template or the template refuses."""
    if kit.template is None:
        violation = Violation("spec.chat", "the model has no chat template")
        raise TrunklineError(Reason.BAD_FIELD, f"{model[:128]} has no chat template", violations=[violation])
    return kit.template.render(chat.messages, chat.continue_final_message)


def size(spec: inference_pb2.GenerationSpec) -> int:
    """Bytes of what is to be tokenised, roughly; an id counts as four."""
    return len(spec.prompt) + 4 * len(spec.prompt_token_ids.ids) + sum(len(m.content) for m in spec.chat.messages)


async def off_loop(size_bytes: int, work: Callable[[], _T]) -> _T:
    """`work()`, on a thread if there is much to do."""
    if size_bytes <= LONG_BYTES:
        return work()
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    return await loop.run_in_executor(_THREADS, context.run, work)
