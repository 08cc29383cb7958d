"""Chat templates: equal to transformers, refusing by name, and bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.chat import MAX_OUTPUT_CHARS, ChatTemplate
from shared.clock import SYSTEM_CLOCK
from shared.errors import Reason, TrunklineError

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{%- for message in messages %}\n    {%- if message.role == 'tool' %}{% continue %}{% endif %}\n"
    "    {%- generation %}[{{ message.role }}] {{ message.content | trim }}{{ eos_token }}{% endgeneration %}\n"
    "{%- endfor %}\n{% if add_generation_prompt %}[assistant] {% endif %}"
)
EXOTIC = (
    "{% set ns = namespace(count=0) %}{% macro one(m) %}<{{ m.role }}>{{ m.content | tojson }}{% endmacro %}"
    "{% for m in messages %}{% set ns.count = ns.count + 1 %}{{ one(m) }}{{ loop.index }}/{{ loop.length }}"
    "{{ ', ' if not loop.last }}{% if loop.index > 50 %}{% break %}{% endif %}{% endfor %}"
    "{{ messages[1:] | map(attribute='role') | join('|') }}{{ ns.count }}{% for i in range(3) %}{{ i }}{% endfor %}"
    "{% if tools is not none %}T{% endif %}{{ 'x' * 3 }}{{ 2 ** 3 }}{{ messages[-1]['content'].split('a') | length }}"
)


@dataclass(frozen=True)
class Said:
    role: str
    content: str


class StoppedClock:
    def monotonic(self) -> float:
        return 0.0

    def wall_ms(self) -> int:
        return 1_767_225_600_000  # 2026-01-01


CHATS = [
    [Said("user", "What is the capital of France?")],
    [Said("system", "Be brief."), Said("user", "Hi <b> & 'you' \"there\" é日本🎉"), Said("assistant", " Hello. ")],
    [Said("user", ""), Said("tool", "x"), Said("assistant", "a\n b\t")],
    [Said("user", "{{ 7 * 7 }}{% raise %}")],
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize(
    ("source", "continue_final"),
    [(SMOLLM2, False), (SMOLLM2, True), (TRIMMING, False), (TRIMMING, True), (EXOTIC, False)],
    ids=["smollm2", "smollm2-continue", "trimming", "trimming-continue", "exotic"],
)
def test_a_chat_renders_as_transformers_renders_it(source: str, chat: list[Said], continue_final: bool) -> None:
    (expected,), _ = render_jinja_template(
        [[{"role": said.role, "content": said.content} for said in chat]],
        chat_template=source,
        add_generation_prompt=not continue_final,
        continue_final_message=continue_final,
        **TOKENS,
    )
    assert ChatTemplate(source, TOKENS, SYSTEM_CLOCK).render(chat, continue_final) == expected


def refusal(source: str, chat: list[Said] | None = None, continue_final: bool = False, clock: Any = None) -> str:
    template = ChatTemplate(source, {}, clock or SYSTEM_CLOCK)
    with pytest.raises(TrunklineError) as refused:
        template.render(CHATS[0] if chat is None else chat, continue_final)
    assert refused.value.reason is Reason.BAD_FIELD
    assert [violation.field for violation in refused.value.violations] == ["spec.chat.messages"]
    return refused.value.message


def test_a_templates_own_refusal_reaches_the_client() -> None:
    assert "roles must alternate" in refusal("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ nobody.knows.this }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}{{ cycler.__init__.__globals__.os }}",
        "{% include 'other' %}",
    ],
)
def test_what_a_template_cannot_or_may_not_do_is_a_refusal_without_details(source: str) -> None:
    message = refusal(source)
    assert "cannot take them" in message
    assert "object" not in message


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{% for a in messages %}{% for i in range(9999) %}{% for b in 'x' * 999 %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ 9 ** 9 ** 9 }}",
        f"{{% for i in range(90000) %}}{'x' * (MAX_OUTPUT_CHARS // 80_000)}{{% endfor %}}",
    ],
)
def test_a_template_that_would_run_away_is_stopped(source: str) -> None:
    refusal(source)


def test_a_render_ends_with_its_time() -> None:
    class Hurrying:
        now = 0.0

        def monotonic(self) -> float:
            self.now += 1.0
            return self.now

        def wall_ms(self) -> int:
            return 0

    assert "too long" in refusal("{% for i in range(90) %}{{ i }}{% endfor %}", clock=Hurrying())


def test_one_renders_budget_is_not_the_next_ones() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}ok", {}, SYSTEM_CLOCK)
    assert {template.render(CHATS[0]) for _ in range(15)} == {"ok"}


def test_a_template_that_does_not_parse_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        ChatTemplate("{% for %}", {}, SYSTEM_CLOCK)


def test_the_date_comes_from_the_given_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, StoppedClock())
    assert template.render([]) == "01 Jan 2026"


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    assert "leaves out" in refusal("{{ messages[0].role }}", continue_final=True)
    assert "no message" in refusal(SMOLLM2, chat=[], continue_final=True)


def test_messages_are_data_and_never_templates() -> None:
    template = ChatTemplate(SMOLLM2, TOKENS, SYSTEM_CLOCK)
    assert "{{ 7 * 7 }}" in template.render([Said("user", "{{ 7 * 7 }}")])
