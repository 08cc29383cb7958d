"""API keys: what is refused and how, and a keys file that changes under a running gateway."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.auth import POLL_S, Authenticator
from shared.clock import SYSTEM_CLOCK
from shared.errors import Reason, StartError, TrunklineError

SECRET = "tl_k_ab12_0123456789abcdefghijABCDEFGHIJ01"
LIMITS = {"rpm": 60, "tpm": 1000, "concurrency": 4, "max_priority": 3}


class StoppedClock:
    """Tells whatever time it is given."""

    def __init__(self, wall_ms: int) -> None:
        self.now_ms = wall_ms

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_ms / 1000


def key(secret: str = SECRET, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": "k_ab12",
        "sha256": hashlib.sha256(secret.encode()).hexdigest(),
        "tenant": "dev",
        "scopes": ["generate"],
        "models": ["small"],
        "limits": LIMITS,
        "expires_at": None,
    }
    return made | changes


def write(path: Path, *keys: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": list(keys)}))
    return path


def replace(path: Path, content: str) -> None:
    """By a rename, as editors and trunkctl do."""
    new = path.with_suffix(".new")
    new.write_text(content)
    new.rename(path)


def move(path: Path, to: Path) -> Path:
    return path.rename(to)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.json", key())


def reason_of(call: Any, *args: Any) -> Reason:
    with pytest.raises(TrunklineError) as refused:
        call(*args)
    assert SECRET not in refused.value.message
    return refused.value.reason


def test_a_known_secret_becomes_its_principal(keys_file: Path) -> None:
    principal = Authenticator(keys_file, SYSTEM_CLOCK).authenticate(f"Bearer {SECRET}")
    assert (principal.key_id, principal.tenant, principal.limits.tpm) == ("k_ab12", "dev", 1000)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        SECRET,
        f"Basic {SECRET}",
        f"Bearer {SECRET}x",
        f"Bearer {SECRET[:-1]}",
        "Bearer tl_k_other_0123456789abcdefghijABCDEFGHIJ01",
        "Bearer tl_k_ab12_",
        "Bearer " + "tl_k_ab12_" + "x" * 100_000,
        "Bearer tl_k_ab12_\u00e9\ud800",
        "Bearer \x00",
    ],
)
def test_every_other_header_is_an_unknown_key(keys_file: Path, header: str | None) -> None:
    assert reason_of(Authenticator(keys_file, SYSTEM_CLOCK).authenticate, header) is Reason.KEY_UNKNOWN


def test_a_hash_in_the_place_of_the_secret_does_not_open(keys_file: Path) -> None:
    stolen = hashlib.sha256(SECRET.encode()).hexdigest()
    authenticator = Authenticator(keys_file, SYSTEM_CLOCK)
    assert reason_of(authenticator.authenticate, f"Bearer tl_k_ab12_{stolen}") is Reason.KEY_UNKNOWN


def test_a_key_expires_at_its_time_and_only_for_who_knows_it(tmp_path: Path) -> None:
    clock = StoppedClock(1_767_225_599_999)
    path = write(tmp_path / "keys.json", key(expires_at="2026-01-01T00:00:00Z"))
    authenticator = Authenticator(path, clock)
    authenticator.authenticate(f"Bearer {SECRET}")
    clock.now_ms += 1
    assert reason_of(authenticator.authenticate, f"Bearer {SECRET}") is Reason.KEY_EXPIRED
    assert reason_of(authenticator.authenticate, f"Bearer {SECRET}x") is Reason.KEY_UNKNOWN


def test_scope_and_model_are_refused_by_their_own_reasons(keys_file: Path) -> None:
    authenticator = Authenticator(keys_file, SYSTEM_CLOCK)
    principal = authenticator.authenticate(f"Bearer {SECRET}")
    authenticator.authorize(principal, "generate", "small")
    assert reason_of(authenticator.authorize, principal, "embed", "small") is Reason.SCOPE_FORBIDDEN
    assert reason_of(authenticator.authorize, principal, "generate", "large") is Reason.MODEL_FORBIDDEN
    assert not principal.may_use("smal")
    assert not principal.may_use("*")


def test_a_star_allows_every_model(tmp_path: Path) -> None:
    authenticator = Authenticator(write(tmp_path / "keys.json", key(models=["*"])), SYSTEM_CLOCK)
    authenticator.authorize(authenticator.authenticate(f"Bearer {SECRET}"), "generate", "anything")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"keys": 3}',
        json.dumps({"keys": [key(), key()]}),
        json.dumps({"keys": [key(sha256="short")]}),
        json.dumps({"keys": [key(tenant="a b")]}),
        json.dumps({"keys": [key(scopes=["everything"])]}),
        json.dumps({"keys": [key(limits={**LIMITS, "rpm": 0})]}),
        json.dumps({"keys": [key(limit={})]}),
    ],
)
async def test_a_broken_file_stops_a_start_but_not_a_running_gateway(
    tmp_path: Path, keys_file: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(content)
    with pytest.raises(StartError, match=r"broken\.json"):
        Authenticator(broken, SYSTEM_CLOCK)

    authenticator = Authenticator(keys_file, SYSTEM_CLOCK)
    replace(keys_file, content)
    await authenticator.reload()
    await authenticator.reload()
    authenticator.authenticate(f"Bearer {SECRET}")
    assert authenticator.broken
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1, "said once, not every second"


async def test_a_missing_file_keeps_the_last_good_one_and_is_read_when_it_is_back(keys_file: Path) -> None:
    authenticator = Authenticator(keys_file, SYSTEM_CLOCK)
    away = move(keys_file, keys_file.with_suffix(".away"))
    await authenticator.reload()
    assert authenticator.broken
    authenticator.authenticate(f"Bearer {SECRET}")
    move(away, keys_file)
    await authenticator.reload()
    assert not authenticator.broken


async def test_revoked_and_new_keys_take_effect_while_running(keys_file: Path) -> None:
    authenticator = Authenticator(keys_file, SYSTEM_CLOCK)
    other = "tl_k_cd34_ABCDEFGHIJ0123456789abcdefghij01"
    polling = asyncio.create_task(authenticator.run())
    try:
        replace(keys_file, json.dumps({"keys": [key(other, id="k_cd34")]}))  # of the same size
        await asyncio.sleep(POLL_S + 0.3)
    finally:
        polling.cancel()
    assert reason_or_none(authenticator, other) is None
    assert reason_or_none(authenticator, SECRET) is Reason.KEY_UNKNOWN


def reason_or_none(authenticator: Authenticator, secret: str) -> Reason | None:
    try:
        authenticator.authenticate(f"Bearer {secret}")
    except TrunklineError as exc:
        return exc.reason
    return None


def test_a_file_that_cannot_be_read_is_named_at_the_start(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(StartError, match="cannot be read"):
            Authenticator(path, SYSTEM_CLOCK)


def test_limits_of_single_models_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", key(model_limits={"small": {"rpm": 5}}))
    principal = Authenticator(path, SYSTEM_CLOCK).authenticate(f"Bearer {SECRET}")
    assert principal.model_limits["small"].rpm == 5
    assert principal.limits.rpm == 60
