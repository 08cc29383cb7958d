"""Keys: what is stored is no secret, and what was revoked is gone."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

import pytest

from trunkctl.home import Home
from trunkctl.keys import ensure_dev_key, read_keys
from trunkctl.main import run


def trunkctl(home: Path, *args: str) -> int:
    return run(["--home", str(home), *args])


def test_a_created_key_prints_its_secret_once_and_stores_only_the_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trunkctl(tmp_path, "keys", "create", "--tenant", "acme", "--scope", "embed", "--rpm", "7") == 0
    secret = capsys.readouterr().out.strip()
    text = (tmp_path / "keys.json").read_text()
    (record,) = json.loads(text)["keys"]
    assert secret not in text
    assert record["sha256"] == hashlib.sha256(secret.encode()).hexdigest()
    assert secret.startswith(f"tl_{record['id']}_")
    assert (record["tenant"], record["scopes"], record["limits"]["rpm"]) == ("acme", ["embed"], 7)
    assert trunkctl(tmp_path, "keys", "list") == 0
    assert secret.rpartition("_")[2] not in capsys.readouterr().out


def test_a_list_breaks_no_id_however_narrow_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    tenant = "a-tenant-with-a-name-of-fifty-characters-and-no-more"
    trunkctl(tmp_path, "keys", "create", "--tenant", tenant)
    (key,) = read_keys(Home(tmp_path))
    capsys.readouterr()
    assert trunkctl(tmp_path, "keys", "list") == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[-3:] == ["concurrency", "priority", "expires"]
    assert line.split()[:2] == [key.id, tenant]


def test_revoking_takes_out_the_named_keys_or_none_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tenant in ("a", "b"):
        trunkctl(tmp_path, "keys", "create", "--tenant", tenant)
    first, second = (key.id for key in read_keys(Home(tmp_path)))
    assert trunkctl(tmp_path, "keys", "revoke", first, "unknown") == 1
    assert "unknown" in capsys.readouterr().err
    assert trunkctl(tmp_path, "keys", "revoke", first) == 0
    assert [key.id for key in read_keys(Home(tmp_path))] == [second]


def test_an_expiry_is_written_as_utc(tmp_path: Path) -> None:
    trunkctl(tmp_path, "keys", "create", "--tenant", "a", "--expires-in-days", "1.5")
    (record,) = json.loads((tmp_path / "keys.json").read_text())["keys"]
    assert record["expires_at"].endswith("Z")


def test_a_key_that_gateways_would_refuse_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trunkctl(tmp_path, "keys", "create", "--tenant", "not a name") == 1
    assert "tenant" in capsys.readouterr().err
    assert not (tmp_path / "keys.json").exists()


def test_what_an_operator_wrote_into_the_file_by_hand_stays(tmp_path: Path) -> None:
    trunkctl(tmp_path, "keys", "create", "--tenant", "a")
    path = tmp_path / "keys.json"
    written = json.loads(path.read_text())
    written["keys"][0]["model_limits"] = {"m": {"rpm": 5, "tpm": 6, "concurrency": 7}}
    path.write_text(json.dumps(written))
    trunkctl(tmp_path, "keys", "create", "--tenant", "b")
    assert json.loads(path.read_text())["keys"][0]["model_limits"] == written["keys"][0]["model_limits"]


def test_the_local_key_is_made_once_is_private_and_comes_back_when_its_record_is_lost(tmp_path: Path) -> None:
    home = Home(tmp_path)
    ensure_dev_key(home)
    secret = home.dev_key.read_text()
    ensure_dev_key(home)
    assert home.dev_key.read_text() == secret
    assert len(read_keys(home)) == 1
    assert stat.S_IMODE(home.dev_key.stat().st_mode) == stat.S_IMODE(home.keys.stat().st_mode) == 0o600
    home.keys.unlink()
    ensure_dev_key(home)
    (key,) = read_keys(home)
    assert key.sha256 == hashlib.sha256(home.dev_key.read_text().strip().encode()).hexdigest()


def test_a_damaged_key_file_is_named_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys.json").write_text("{")
    assert trunkctl(tmp_path, "keys", "create", "--tenant", "a") == 1
    assert "keys.json" in capsys.readouterr().err
    assert (tmp_path / "keys.json").read_text() == "{"
