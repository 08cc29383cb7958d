"""Bounded logs: a process appends to its file by itself, and its supervisor cuts the file when it is too long."""

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

LIMIT = 8 << 20  # bytes in a log, and as many again in the piece before it
TAIL = 16 << 10  # bytes looked at for the last lines


def open_log(path: Path) -> int:
    """A descriptor that appends; writing goes on at the new end after the file was cut. The caller closes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


async def keep_bounded(path: Path, every_s: float = 1.0) -> None:
    """Cuts the log whenever it passes LIMIT. Runs until cancelled.

    Lines written between the copy and the cut are lost: the price of processes that need no reader to go on.
    """
    while True:
        cut(path)
        await asyncio.sleep(every_s)


def cut(path: Path, limit: int = LIMIT) -> None:
    """Moves the log's content to `<name>.1` if it is longer than `limit` bytes. A log that somebody removed is fine."""
    with suppress(FileNotFoundError):
        if path.stat().st_size <= limit:
            return
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines that say something; fewer where the log is short."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]
