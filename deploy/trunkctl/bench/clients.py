"""The clients of a load: one streamed request at a time each call, whatever the protocol.

The one rule: a client reports each piece in the moment it comes, and raises Failed for whatever ends a stream early.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from trunkctl.bench.workload import Request

Arrived = Callable[[int], None]
"""Called with the number of tokens of each piece."""


class Failed(Exception):
    """A request came to nothing; its text is the kind of error, by which failures are counted."""


@dataclass(frozen=True)
class Target:
    """Whom to ask, and how. Several addresses take turns."""

    protocol: Literal["grpc", "openai-http"]
    addresses: tuple[str, ...]
    key: str  # empty: none is sent
    model: str
    timeout_s: float
    temperature: float
    ignore_eos: bool


class Client(Protocol):
    """A way to the target."""

    async def stream(self, request: Request, arrived: Arrived) -> int:
        """Runs one request to its end; answers how many tokens the server counted, 0 if it did not say. Raises Failed;
        cancels when cancelled."""
        ...

    async def close(self) -> None:
        """Ends what is open."""
        ...
