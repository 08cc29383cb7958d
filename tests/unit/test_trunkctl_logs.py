"""Logs stay bounded while their writers go on."""

from __future__ import annotations

import os
from pathlib import Path

from trunkctl.logs import cut, last_lines, open_log


def test_a_long_log_is_cut_and_its_writer_goes_on_in_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    writer = open_log(path)
    os.write(writer, b"old\n" * 10)
    cut(path, limit=20)
    os.write(writer, b"new\n")
    os.close(writer)
    assert path.read_bytes() == b"new\n"
    assert path.with_name("a.log.1").read_bytes() == b"old\n" * 10


def test_a_short_or_missing_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    cut(path)
    path.write_text("x\n")
    cut(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.log"]


def test_the_last_words_skip_empty_lines_and_broken_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert last_lines(path, 1) == []
    path.write_bytes(b"x" * 100_000 + b"\nfirst\n\xff last\n\n  \n")
    assert last_lines(path, 2) == ["first", "\ufffd last"]
