from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.config import ConfigError, build, load


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests_per_minute: int = 600
    burst: float = 1.0


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    address: str
    weight: float = 1.0


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str = "g0"
    redis_url: str = ""
    limits: Limits = Limits()
    per_model: dict[str, Limits] = {}
    routes: list[Route] = []
    maybe: Limits | None = None


def loaded(tmp_path: Path, text: str) -> Service:
    path = tmp_path / "service.yaml"
    path.write_text(text, "utf-8")
    return load(path, Service)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    said = str(caught.value)
    assert said.startswith(str(tmp_path / "service.yaml"))
    assert "\n" not in said
    return said.removeprefix(f"{tmp_path}/service.yaml: ")


def test_a_file_becomes_the_struct_with_defaults_for_what_it_leaves_out(tmp_path: Path) -> None:
    text = """
        id: g7
        limits: {burst: 2}
        per_model: {smollm2: {requests_per_minute: 5}}
        routes: [{address: "127.0.0.1:1"}]
    """
    config = loaded(tmp_path, text)
    assert config == Service(
        id="g7",
        limits=Limits(burst=2.0),
        per_model={"smollm2": Limits(requests_per_minute=5)},
        routes=[Route("127.0.0.1:1")],
    )
    assert loaded(tmp_path, "") == Service()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("redis_ulr: x", "unknown key `redis_ulr`; did you mean `redis_url`?"),
        ("limits: {requests_per_minut: 1}", "`limits.requests_per_minut`; did you mean `requests_per_minute`?"),
        ("per_model: {m: {bursts: 1}}", "`per_model.m.bursts`; did you mean `burst`?"),
        ("routes: [{address: a}, {address: b, wieght: 2}]", "`routes[1].wieght`; did you mean `weight`?"),
        ("maybe: {brust: 1}", "`maybe.brust`; did you mean `burst`?"),
        ("zzzzzz: 1", "unknown key `zzzzzz`; known keys: id, limits, maybe, per_model, redis_url, routes"),
        ("7: 1", "unknown key `7`"),
        ("limits: {burst: fast}", "`limits.burst`: expected `float`, got `str`"),
        ("routes: [{weight: 1}]", "`routes[0]`: object missing required field `address`"),
        ("id: 5", "`id`: expected `str`, got `int`"),
        ("[1, 2]", "must be a mapping of keys to values"),
        ("id: a\nid: b", "line 1: key `id` is written twice"),
        ("limits:\n  burst: 1\n  burst: 2", "line 2: key `burst` is written twice"),
        ("id: {", "line 1: "),
        ("id: !!python/object:os.system x", "line 1: "),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read \(No such file or directory\)"):
        load(tmp_path / "none.yaml", Service)
    (tmp_path / "latin.yaml").write_bytes(b"id: caf\xe9")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load(tmp_path / "latin.yaml", Service)


def test_secrets_come_from_the_environment_and_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TL_TEST_PASSWORD", "s3cret")
    (tmp_path / "password").write_text("from file\n")
    assert loaded(tmp_path, 'redis_url: "redis://:${env:TL_TEST_PASSWORD}@h"').redis_url == "redis://:s3cret@h"
    assert loaded(tmp_path, f'redis_url: "${{file:{tmp_path}/password}}"').redis_url == "from file"


def test_a_missing_secret_is_named_and_its_neighbours_are_not_shown(tmp_path: Path) -> None:
    said = refusal(tmp_path, 'redis_url: "redis://user:topsecret@${env:TL_TEST_NOT_SET}"')
    assert "environment variable TL_TEST_NOT_SET is not set" in said
    assert "topsecret" not in said
    assert "cannot be read" in refusal(tmp_path, 'redis_url: "${file:/does/not/exist}"')


def test_data_that_is_already_parsed_is_checked_the_same_way() -> None:
    with pytest.raises(ConfigError, match=r"^flags: unknown key `idd`; did you mean `id`\?$"):
        build({"idd": 1}, Service, source="flags")
