"""What all tests may ask for, and two checks on every asynchronous test: no task outlives it, and nothing blocks a loop
that the test watches."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.otlp import OtlpReceiver
from tests.fakes.valkey import Valkey

_ARTEFACT = Path(__file__).parent.parent / ".trunkline" / "models" / "smollm2-135m-instruct"


@pytest.fixture
def clock() -> FakeClock:
    """A clock that moves when told to."""
    return FakeClock()


@pytest.fixture(scope="session")
def _valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture
def redis_url(_valkey: Valkey) -> str:
    """URL of a real, empty state store; tests of one session share the server one after the other."""
    with _valkey.client() as client:
        client.flushall()
        client.script_flush()
    return _valkey.url


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A state store of the test's own, to kill and stop."""
    with Valkey() as server:
        yield server


@pytest.fixture
def otlp() -> Iterator[OtlpReceiver]:
    """A trace collector on a loopback port."""
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def artefact_dir() -> Path:
    """The converted model that the mesh serves by default."""
    if not (_ARTEFACT / "manifest.json").exists():
        pytest.fail(f"the model is not there ({_ARTEFACT.name}): run `make setup`")
    return _ARTEFACT


@pytest.fixture
async def unblocked(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Fails the test if any one step on its loop took longer than 250 ms (machines that run tests are busy)."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 0.25
    with caplog.at_level(logging.WARNING, logger="asyncio"):
        yield
    loop.set_debug(False)
    said = [record.getMessage() for record in caplog.get_records("call") if record.name == "asyncio"]
    slow = [text for text in said if " took " in text]
    assert not slow, f"the event loop was blocked: {slow}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let every asynchronous test end with the tasks it began with."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _leaves_no_task(item.obj)


def _leaves_no_task(test: Any) -> Any:
    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        before = asyncio.all_tasks()
        await test(*args, **kwargs)
        left = asyncio.all_tasks() - before
        if left:  # cancelled ones need a turn to end
            _, left = await asyncio.wait(left, timeout=0.5)
        assert not left, f"tasks outlive the test: {[task.get_coro() for task in left]}"

    return checked
