"""Tokenizer and chat template of the converted model against transformers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from gateway.chat import ChatTemplate
from gateway.tokens import Detokenizer, Tokenizer
from shared.clock import SYSTEM_CLOCK

TEXTS = [
    "The capital of France is Paris, founded 2018-01-22 12:12:53.",
    "日本語 and 中文 and 한국어, mixed with Ελληνικά — «quotes» … and naïve café",
    "👩‍👩‍👧‍👦🇩🇪🏳️‍🌈 e\u0301\u0323 Z̸̡̛a̴l̵g̶o \u200b\ufeff\x00",
    "def f(x):\n\treturn x ** 2   # comment\r\n\n\n",
    "<|im_start|>user\nhello<|im_end|>\n",
]


@dataclass(frozen=True)
class Said:
    role: str
    content: str


CHATS = [
    [Said("user", "What is the capital of France?")],
    [
        Said("system", "Be brief."),
        Said("user", "日本の首都は？"),
        Said("assistant", "東京 <b>&</b>"),
        Said("user", "  "),
    ],
]


@pytest.fixture(scope="module")
def ours(artefact_dir: Path) -> Tokenizer:
    return Tokenizer((artefact_dir / "tokenizer.json").read_bytes())


@pytest.fixture(scope="module")
def theirs(artefact_dir: Path) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_file=str(artefact_dir / "tokenizer.json"))
    made.chat_template = (artefact_dir / "chat_template.jinja").read_text()
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_same_ids_and_come_back_token_by_token(
    ours: Tokenizer, theirs: PreTrainedTokenizerFast, text: str
) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    detokenizer = Detokenizer(ours, skip_special=False)
    assert "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish() == text


@pytest.mark.parametrize("skip", [False, True])
def test_random_ids_have_the_same_text(ours: Tokenizer, theirs: PreTrainedTokenizerFast, skip: bool) -> None:
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randint(0, 40))]
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        detokenizer = Detokenizer(ours, skip)
        assert "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish() == expected


@pytest.mark.parametrize("continue_final", [False, True])
@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
def test_chats_become_the_same_prompt(
    artefact_dir: Path, ours: Tokenizer, theirs: PreTrainedTokenizerFast, chat: list[Said], continue_final: bool
) -> None:
    template = ChatTemplate((artefact_dir / "chat_template.jinja").read_text(), {}, SYSTEM_CLOCK)
    text = template.render(chat, continue_final)
    messages = [{"role": said.role, "content": said.content} for said in chat]
    how = {"add_generation_prompt": not continue_final, "continue_final_message": continue_final}
    assert text == theirs.apply_chat_template(messages, tokenize=False, **how)
    assert ours.encode(text, special=False) == theirs.apply_chat_template(messages, return_dict=False, **how)
