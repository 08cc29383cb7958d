"""What all tests may ask for, and two checks on every asynchronous test: no task outlives it, and nothing blocks a loop
that the test watches."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.otlp import OtlpReceiver
from tests.fakes.valkey import Valkey

LONGEST_STEP_S = 0.15
hypothesis.settings.register_profile("trunkline", deadline=None)  # time on the clock says nothing on a busy machine
hypothesis.settings.load_profile("trunkline")
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
def unblocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if any one step on its loop takes more than 150 ms of processor time. Time on the clock says
    nothing on a busy machine; calls that wait for the outside are ruff's to find."""
    run = asyncio.Handle._run
    slow: list[str] = []

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        spent_s = time.thread_time() - began
        if spent_s > LONGEST_STEP_S:
            slow.append(f"{handle!r} took {spent_s:.3f} s")

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    yield
    assert not slow, f"the event loop was blocked: {slow}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let every asynchronous test end with the tasks it began with."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _leaves_no_task(item.obj)


def _is_grpcs(task: asyncio.Task[Any]) -> bool:
    """A call's wait for its status, which grpc keeps where the server was killed and ends with the channel."""
    return "_handle_status_once_received" in repr(task)


def _leaves_no_task(test: Any) -> Any:
    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        before = asyncio.all_tasks()
        await test(*args, **kwargs)
        left = {task for task in asyncio.all_tasks() - before if not _is_grpcs(task)}
        if left:  # cancelled ones need a few turns to end, and turns of a busy machine are long
            _, left = await asyncio.wait(left, timeout=5.0)
        assert not left, f"tasks outlive the test: {[task.get_coro() for task in left]}"

    return checked
