"""Single cases of tokens.py; the properties are in tests/property/test_tokens.py."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from gateway.tokens import Detokenizer, StopMatcher, Tokenizer, UnsupportedTokenizerError


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return model


def made(model: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(model.to_str().encode())


@pytest.fixture
def tokenizer() -> Tokenizer:
    return made(byte_level())


def test_a_split_character_comes_out_whole_with_its_last_token(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("a🎉b")
    assert [detokenizer.push([token_id]) for token_id in ids] == ["a", "", "", "", "🎉", "b"]
    assert detokenizer.finish() == ""


def test_a_text_that_ends_inside_a_character_says_so_only_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("a🎉")[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_skipped_and_do_not_break_a_character(tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode("é")
    end = tokenizer.token_id("</s>")
    assert end is not None
    assert end in tokenizer.special_ids
    assert tokenizer.decode([first, end, *rest]) == "é"
    assert tokenizer.decode([end, *tokenizer.encode("x")], skip_special=False) == "</s>x"
    assert tokenizer.token_text(end) == "</s>"


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([999_999]) == ""
    assert tokenizer.token_bytes(999_999) == b""


def test_prompts_get_the_tokenizers_special_tokens_and_rendered_chats_none() -> None:
    model = byte_level()
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))]
    )
    tokenizer = made(model)
    assert tokenizer.encode("x") == [model.token_to_id("<s>"), *tokenizer.encode("x", special=False)]


def test_truncation_and_padding_of_the_file_are_left_out() -> None:
    model = byte_level()
    model.enable_truncation(4)
    model.enable_padding(length=16)
    assert len(made(model).encode("0123456789")) == 10


def test_a_tokenizer_that_cannot_be_read_says_so() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Tokenizer(b"{}")
    with pytest.raises(ValueError, match="cannot be read"):
        Tokenizer(b"\xff")


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
    ],
)
def test_a_decoder_that_cannot_work_token_by_token_is_refused(decoder: dict[str, object]) -> None:
    config = json.loads(byte_level().to_str())
    config["decoder"] = decoder
    with pytest.raises(UnsupportedTokenizerError, match="decoder"):
        Tokenizer(json.dumps(config).encode())


def test_a_stop_is_found_across_token_borders_and_only_its_prefix_is_held() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    shown = [matcher.push(text) for text in ["Hi", "\n", "\nU", "s", "er", ": more"]]
    assert shown == [("Hi", None), ("", None), ("", None), ("", None), ("", None), ("", "\n\nUser:")]
    assert matcher.push("never shown") == ("", "\n\nUser:")
    assert matcher.finish() == ""


def test_what_was_held_is_shown_once_it_cannot_become_a_stop() -> None:
    matcher = StopMatcher(["abcd"])
    assert [matcher.push(char)[0] for char in "abcabx"] == ["", "", "", "abc", "", "abx"]


def test_a_text_that_ends_in_half_a_stop_loses_nothing() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("wait ST") == ("wait ", None)
    assert matcher.finish() == "ST"


def test_an_included_stop_stays_and_what_follows_goes() -> None:
    matcher = StopMatcher(["."], include_stop=True)
    assert matcher.push("One. Two.") == ("One.", ".")


def test_the_stop_that_completes_first_wins_and_of_two_the_longest() -> None:
    assert StopMatcher(["abcd", "bc"]).push("abcd") == ("a", "bc")
    assert StopMatcher(["c", "abc"]).push("abc") == ("", "abc")
