"""Chat templates: messages in, the prompt's text out.

Owns the sandbox they run in. The one rule: templates are part of a model and messages of a request, and neither may
hurt the gateway: no attribute leads out of the sandbox, and loops, repetition, output and time are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from shared.clock import Clock
from shared.errors import Reason, TrunklineError, Violation

MAX_OUTPUT_CHARS: Final = 8 * 1024 * 1024
MAX_ROUNDS: Final = 1_000_000  # of all loops of one render together
MAX_REPEATED: Final = 1_000_000  # items or characters that one `*` or `**` may make
MAX_POWER: Final = 64
MAX_SECONDS: Final = 2.0
_CONTINUE_MARK: Final = "\ue000trunkline-continue\ue000 "  # private-use characters: no message may bring its own


class Message(Protocol):
    """A message, such as `inference_pb2.ChatMessage`."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...


class _TemplateRefusedError(jinja2.TemplateError):
    """The template itself said no; its text is meant for the client."""


class _BudgetExceededError(jinja2.TemplateError):
    """The render does more than it may."""


@dataclass(slots=True)
class _Budget:
    """What one render may still do."""

    clock: Clock
    ends: float
    rounds: int = MAX_ROUNDS
    chars: int = MAX_OUTPUT_CHARS

    def take(self, *, rounds: int = 0, chars: int = 0) -> None:
        self.rounds -= rounds
        self.chars -= chars
        if self.rounds < 0 or self.chars < 0 or self.clock.monotonic() > self.ends:
            raise _BudgetExceededError("the template runs too long")


# Renders run on several threads, each in its own context.
_budget: ContextVar[_Budget] = ContextVar("_budget")


class ChatTemplate:
    """One model's template. `render` is safe to call from several threads.

    `special_tokens` are the names templates use (bos_token, eos_token, …). Raises ValueError for a template that does
    not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock) -> None:
        self._clock = clock
        self._special_tokens = dict(special_tokens)
        environment = _environment(clock)
        try:
            self._template = environment.from_string(_count_rounds(environment.parse(source)))
        except jinja2.TemplateError as exc:
            raise ValueError(f"the chat template cannot be read: {exc}") from exc

    def render(self, messages: Iterable[Message], continue_final: bool = False) -> str:
        """The prompt: the messages and the start of the assistant's turn, or with `continue_final` the messages up to
        the end of the last one's content. Tokenise it without special tokens: the template wrote them.

        Raises BAD_FIELD naming the messages when the template refuses or cannot take them.
        """
        chat = [{"role": message.role, "content": message.content} for message in messages]
        if continue_final:
            if not chat:
                _refuse("there is no message to continue")
            chat[-1]["content"] += _CONTINUE_MARK
        text = self._run(chat, add_generation_prompt=not continue_final)
        return _cut_at_mark(text) if continue_final else text

    def _run(self, chat: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        budget = _Budget(self._clock, self._clock.monotonic() + MAX_SECONDS)
        token = _budget.set(budget)
        pieces = []
        try:
            for piece in self._template.generate(
                messages=chat,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                budget.take(chars=len(piece))
                pieces.append(piece)
        except (_TemplateRefusedError, _BudgetExceededError) as exc:
            _refuse(str(exc.message))
        except Exception as exc:  # a template is a program: whatever it raises, these messages made it
            _refuse(f"the model's chat template cannot take them ({type(exc).__name__})", exc)
        finally:
            _budget.reset(token)
        return "".join(pieces)


def _refuse(why: str, cause: Exception | None = None) -> NoReturn:
    violation = Violation("spec.chat.messages", why)
    raise TrunklineError(Reason.BAD_FIELD, f"messages: {why}", violations=[violation]) from cause


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_CONTINUE_MARK.rstrip())
    if place < 0:
        _refuse("the model's chat template leaves out the message to continue")
    # A template that trims contents took the mark's space away, and would have taken the content's too.
    return text[:place] if text.startswith(_CONTINUE_MARK, place) else text[:place].rstrip()


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """No attribute that leads out, no method that changes a value, no operator that blows one up."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_small(left) and _small(right)):
            raise _BudgetExceededError("the template raises to a power that is too large")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, Sized) and isinstance(times, int) and len(value) * times > MAX_REPEATED:
                    raise _BudgetExceededError("the template repeats a value too often")
        return super().call_binop(context, operator, left, right)


def _small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_POWER


class _Generation(jinja2.ext.Extension):
    """Accepts {% generation %} … {% endgeneration %}, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  (so declared by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment(clock: Clock) -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], cache_size=0
    )
    environment.filters["tojson"] = _to_json
    environment.filters["_rounds"] = _rounds

    def strftime_now(form: str) -> str:
        return datetime.fromtimestamp(clock.wall_ms() / 1000, UTC).strftime(form)

    environment.globals.update(raise_exception=_raise, strftime_now=strftime_now)
    return environment


def _count_rounds(template: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """The same template whose loops take their rounds from the budget."""
    for loop in template.find_all(jinja2.nodes.For):
        loop.iter = jinja2.nodes.Filter(loop.iter, "_rounds", [], [], None, None, lineno=loop.lineno)
    return template


def _rounds(items: Any) -> Any:
    budget = _budget.get()
    if isinstance(items, Sized):
        budget.take(rounds=1 + len(items))
        return items
    return _counted(iter(items), budget)


def _counted(items: Iterator[Any], budget: _Budget) -> Iterator[Any]:
    for item in items:
        budget.take(rounds=1)
        yield item


def _raise(message: str) -> NoReturn:
    raise _TemplateRefusedError(str(message)[:300])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without HTML escapes, which Jinja's own filter makes and models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
