"""One command at a time starts, ends or rolls the mesh of a home directory; a second one waits."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from trunkctl.home import Home


@contextmanager
def locked(home: Home) -> Iterator[None]:
    """The turn is ours inside the scope."""
    home.root.mkdir(parents=True, exist_ok=True)
    with open(home.lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
