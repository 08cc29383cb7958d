"""The tokenizer rebuilt from a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.fakes.checkpoints import SPECIALS, VOCABULARY, gguf_metadata
from workers.weights.tokenizer import tokenizer_from_gguf

METADATA = {key: value[1][1] if value[0] == 9 else value[1] for key, value in gguf_metadata().items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(METADATA)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text).tokens


def test_merges_apply_inside_words_and_spaces_stay_with_the_word_behind(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "hello the") == ["hello", "Ġthe"]


def test_every_digit_stands_alone_even_where_a_merge_exists(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "12 a12") == ["1", "2", "Ġ", "a", "1", "2"]
    assert pieces(tokenizer, "٣1") == [*pieces(tokenizer, "٣"), "1"]


def test_special_tokens_are_one_id_wherever_they_stand(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>").ids
    assert ids == [VOCABULARY.index(token) for token in ("<|im_start|>", "hello", "<|im_end|>")]
    assert tokenizer.decode(ids) == "hello"
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == [0, 1, 2]


def test_nothing_is_added_in_front_or_behind(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("").ids == []
    assert len(tokenizer.encode("h").ids) == 1


@given(st.text())
def test_text_of_any_script_comes_back(tokenizer: Tokenizer, text: str) -> None:
    if not any(token in text for token in SPECIALS):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_writing_it_twice_gives_the_same_file() -> None:
    assert tokenizer_from_gguf(METADATA).to_str() == tokenizer_from_gguf(METADATA).to_str()


REAL = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "2018": [34, 32, 33, 40],
    "<|im_start|>user\nHi<|im_end|>": [1, 4093, 198, 26843, 2],
    "  x": [216, 1792],
    "": [],
}


@pytest.mark.parametrize("text", REAL)
def test_the_default_model_tokenises_as_its_family_does(artefact_dir: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(artefact_dir / "tokenizer.json"))
    assert tokenizer.encode(text).ids == REAL[text]


@pytest.mark.parametrize(
    "text", ["naïve Ünïcödé", "日本語 テスト", "🦊🎉 emoji", "tabs\tand\nlines\r\n", "１２３ ¾ Ⅷ 42"]
)
def test_the_default_model_brings_back_every_script(artefact_dir: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(artefact_dir / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
