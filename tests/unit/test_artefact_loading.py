"""An artefact that is not exactly as converted is refused, and the refusal names what is wrong."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.checkpoints import small_artefact, tensors, verified
from workers.weights import manifest as m
from workers.weights.load import check_texts, load_weights
from workers.weights.manifest import ArtefactError, Manifest, TensorEntry, read_manifest, sealed, write_manifest

WEIGHTS = "model-pp0-tp0.safetensors"
FIRST, LAST = "model.embed_tokens.weight", "model.norm.weight"


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(small_artefact(), tmp_path / "model"))


def refusal(artefact: Path) -> ArtefactError:
    with pytest.raises(ArtefactError) as caught:
        verified(artefact)
    return caught.value


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def entry(artefact: Path, name: str) -> TensorEntry:
    return next(each for each in read_manifest(artefact).tensors if each.name == name)


def reseal(artefact: Path, change: Callable[[Manifest], Manifest]) -> None:
    """A manifest that is whole in itself and says something else."""
    write_manifest(artefact, sealed(change(read_manifest(artefact))))


def without(name: str) -> Callable[[Manifest], Manifest]:
    return lambda old: msgspec.structs.replace(old, tensors=tuple(e for e in old.tensors if e.name != name))


def changed(name: str, **fields: object) -> Callable[[Manifest], Manifest]:
    def change(old: Manifest) -> Manifest:
        entries = [msgspec.structs.replace(e, **fields) if e.name == name else e for e in old.tensors]
        return msgspec.structs.replace(old, tensors=tuple(entries))

    return change


def test_a_whole_artefact_gives_back_the_weights_it_was_made_from() -> None:
    manifest = verified(small_artefact())
    config = check_texts(small_artefact(), manifest)
    loaded = load_weights(small_artefact(), manifest, config, 2)
    assert loaded.tensors.keys() == tensors().keys()
    loaded.drop_pages()
    for name, tensor in tensors().items():
        assert torch.equal(loaded.tensors[name], tensor)


@pytest.mark.parametrize("name", [FIRST, "model.layers.1.mlp.up_proj.weight", LAST])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_byte_in_a_tensor_names_the_tensor(artefact: Path, name: str, place: str) -> None:
    found = entry(artefact, name)
    flip(artefact / WEIGHTS, found.offset + {"first": 0, "middle": found.size // 2, "last": found.size - 1}[place])
    error = refusal(artefact)
    assert error.subject == name
    assert "altered" in str(error)


@pytest.mark.parametrize("at", [0, 7, 8, 40, -1])
def test_a_flipped_byte_in_the_header_names_the_file(artefact: Path, at: int) -> None:
    header = entry(artefact, FIRST).offset
    flip(artefact / WEIGHTS, at if at >= 0 else header + at)
    assert refusal(artefact).subject == WEIGHTS


@pytest.mark.parametrize("name", [m.CONFIG, m.GENERATION, m.TOKENIZER, m.TEMPLATE, m.SPECIAL_TOKENS, m.GOLDEN])
def test_a_changed_or_missing_file_is_named(artefact: Path, name: str) -> None:
    flip(artefact / name, 3)
    assert refusal(artefact).subject == name
    (artefact / name).unlink()
    error = refusal(artefact)
    assert (error.subject, "missing" in str(error)) == (name, True)


def test_a_missing_weights_file_is_named(artefact: Path) -> None:
    (artefact / WEIGHTS).unlink()
    error = refusal(artefact)
    assert (error.subject, "missing" in str(error)) == (WEIGHTS, True)


def test_a_tensor_cut_short_is_named(artefact: Path) -> None:
    content = (artefact / WEIGHTS).read_bytes()
    (artefact / WEIGHTS).write_bytes(content[:-1])
    error = refusal(artefact)
    assert error.subject == LAST
    assert "cut short" in str(error)


def test_a_file_cut_inside_its_header_or_grown_is_named(artefact: Path) -> None:
    content = (artefact / WEIGHTS).read_bytes()
    for damaged in (b"", content[:5], content[:20], content + b"\0"):
        (artefact / WEIGHTS).write_bytes(damaged)
        assert refusal(artefact).subject == WEIGHTS


def rewritten(artefact: Path, change: Callable[[dict[str, dict]], None]) -> None:
    """Another header of the same length."""
    content = (artefact / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    entries = json.loads(content[8 : 8 + length])
    change(entries)
    text = json.dumps(entries, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    (artefact / WEIGHTS).write_bytes(content[:8] + text + content[8 + length :])


def test_a_tensor_missing_from_the_file_is_named(artefact: Path) -> None:
    rewritten(artefact, lambda entries: entries.update({"other": entries.pop(LAST)}))
    error = refusal(artefact)
    assert (error.subject, "missing in" in str(error)) == (LAST, True)


def test_two_tensors_that_changed_places_are_named(artefact: Path) -> None:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]

    def swap(entries: dict[str, dict]) -> None:
        entries[names[0]], entries[names[1]] = entries[names[1]], entries[names[0]]

    rewritten(artefact, swap)
    error = refusal(artefact)
    assert error.subject in names
    assert "misplaced" in str(error)


def test_tensors_that_overlap_are_named(artefact: Path) -> None:
    rewritten(
        artefact,
        lambda entries: entries[LAST].update(
            data_offsets=entries["model.layers.0.input_layernorm.weight"]["data_offsets"]
        ),
    )
    error = refusal(artefact)
    assert "misplaced" in str(error)


def test_an_extra_tensor_in_the_file_is_named(artefact: Path) -> None:
    reseal(artefact, without(LAST))
    error = refusal(artefact)
    assert (error.subject, "missing" in str(error)) == (LAST, True)


def test_a_manifest_with_an_extra_tensor_a_wrong_shape_or_a_wrong_place_names_it(artefact: Path) -> None:
    original = read_manifest(artefact)
    stranger = msgspec.structs.replace(entry(artefact, LAST), name="model.stranger.weight")
    for change, subject, problem in [
        (lambda old: msgspec.structs.replace(old, tensors=(*old.tensors, stranger)), "model.stranger.weight", "extra"),
        (changed(LAST, shape=(47,)), LAST, "shape"),
        (changed(LAST, dtype="BF16"), LAST, "not BF16"),
        (changed(LAST, offset=64), LAST, "misplaced"),
        (changed(LAST, sha256="0" * 64), LAST, "altered"),
    ]:
        write_manifest(artefact, sealed(change(original)))
        error = refusal(artefact)
        assert (error.subject, problem in str(error)) == (subject, True), str(error)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "damaged"), (b"{}", "damaged"), (b"[1]", "damaged"), (b"\xff", "damaged"), (None, "missing")],
)
def test_a_manifest_that_is_none_is_refused(artefact: Path, content: bytes | None, problem: str) -> None:
    path = artefact / m.MANIFEST
    path.unlink() if content is None else path.write_bytes(content)
    error = refusal(artefact)
    assert (error.subject, problem in str(error)) == (m.MANIFEST, True)


def test_a_manifest_that_was_edited_is_refused(artefact: Path) -> None:
    path = artefact / m.MANIFEST
    path.write_text(path.read_text().replace('"fp32"', '"bf16"'))
    assert "its own hash" in str(refusal(artefact))
    reseal_text = path.read_text().replace('"format": 1', '"format": 2')
    path.write_text(reseal_text)
    assert "format 2" in str(refusal(artefact))


def test_a_manifest_that_points_outside_the_directory_is_refused(artefact: Path) -> None:
    reseal(artefact, changed(LAST, file="../../etc/passwd"))
    assert "outside the artefact" in str(refusal(artefact))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_single_flipped_bit_anywhere_goes_unnoticed(artefact: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(path.name for path in artefact.iterdir())))
    path = artefact / name
    at = data.draw(st.integers(0, path.stat().st_size - 1))
    original = path.read_bytes()
    damaged = bytearray(original)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    try:
        refusal(artefact)
    finally:
        path.write_bytes(original)


def test_hashes_follow_what_changes_tokens_and_nothing_else(artefact: Path) -> None:
    before = read_manifest(artefact)
    texts = {name: (artefact / name).read_bytes() for name in m.TOKENIZER_FILES}
    assert m.tokenizer_hash(texts.items()) == before.tokenizer_hash
    for name in texts:
        assert m.tokenizer_hash({**texts, name: b"x"}.items()) != before.tokenizer_hash
    moved = {m.TOKENIZER: texts[m.TOKENIZER] + texts[m.TEMPLATE], m.TEMPLATE: b""}
    assert m.tokenizer_hash({**texts, **moved}.items()) != before.tokenizer_hash

    def hashed(**fields: object) -> str:
        return sealed(msgspec.structs.replace(before, **fields)).artefact_hash

    def with_file(name: str) -> tuple[m.FileEntry, ...]:
        return tuple(msgspec.structs.replace(f, sha256="0") if f.name == name else f for f in before.files)

    same = before.artefact_hash
    assert hashed(name="other", tool="9", files=with_file(m.GOLDEN)) == same
    changes = ({"precision": "bf16"}, {"tensor_parallel": 2}, {"tokenizer_hash": "0"}, {"tensors": before.tensors[1:]})
    assert all(hashed(**fields) != same for fields in changes)
    assert all(hashed(files=with_file(name)) != same for name in (m.CONFIG, m.GENERATION))
