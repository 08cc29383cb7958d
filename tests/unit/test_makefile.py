"""`make` on a machine that lacks something: one plain sentence, and nothing is made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def make(tmp_path: Path, python: str) -> str:
    """What `make` says where only a shell is installed, making the virtual environment's Python."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "make"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    venv = tmp_path / "venv"
    command = ["make", f"VENV={venv}", f"PYTHON={python}", f"{venv}/bin/python"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert not venv.exists()
    return done.stderr


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("", "Trunkline needs Python 3.11 or newer, and none was found (PYTHON=/path/to/python names one)."),
        ("nothing-like-python", "Trunkline needs Python 3.11 or newer; nothing-like-python is not that."),
        (sys.executable, "Trunkline needs a C++ compiler (c++, g++ or clang++), and none was found."),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(python: str, said: str, tmp_path: Path) -> None:
    first, *rest = make(tmp_path, python).splitlines()
    assert first == said
    assert all(line.startswith("make: ***") for line in rest)
