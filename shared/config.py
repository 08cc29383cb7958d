"""Configuration: one YAML file into one frozen msgspec Struct, read once, checked once.

The one rule: an unknown key, a wrong type or a missing secret is a `ConfigError` whose text is one plain sentence with
the file and the place. `${env:NAME}` and `${file:PATH}` inside a string value are replaced: secrets stay out of files.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from shared.errors import StartError
from shared.wire import PROTOCOL

T = TypeVar("T", bound=msgspec.Struct)

_SECRET: Final = re.compile(r"\$\{(env|file):([^}]+)\}")
_AT: Final = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)


Minor = Annotated[int, msgspec.Meta(ge=max(0, PROTOCOL.minor - 1), le=PROTOCOL.minor)]
"""The protocol's minor version to speak: this build's, or the one before."""


class ConfigError(StartError):
    """The configuration cannot be used; the text says where and why in one sentence."""


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a process logs."""

    level: str = "info"
    json: bool = True


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where spans go. `otlp_endpoint` is host:port of an OTLP/gRPC receiver; empty sends none."""

    otlp_endpoint: str = ""
    redis_spans: bool = False  # development: spans also go to the state store, for `trunkctl trace`
    sample_ratio: float = 1.0  # share of new traces that are recorded; a caller's decision is followed


def load(path: str | Path, type_: type[T]) -> T:
    """Read `path` as `type_`. Raises ConfigError."""
    path = Path(path)
    try:
        data = yaml.load(path.read_text("utf-8"), Loader=_Loader)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({exc.strerror})") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: is not UTF-8 text") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: {_yaml_problem(exc)}") from exc
    return build(data, type_, source=str(path))


def build(data: object, type_: type[T], *, source: str) -> T:
    """Check parsed `data` as `type_`; `source` names it in errors. Raises ConfigError."""
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: must be a mapping of keys to values")
    for place, key, known in _unknown_keys(data, type_, ""):
        raise ConfigError(f"{source}: unknown key `{place}{key}`{_nearest(str(key), known)}")
    data = _with_secrets(data, source)
    try:
        return msgspec.convert(data, type_)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{source}: {_problem(str(exc))}") from exc


class _Loader(yaml.SafeLoader):
    """YAML without the trap of a key written twice, where the second silently wins."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    pairs = [(loader.construct_object(k, deep=True), loader.construct_object(v, deep=True)) for k, v in node.value]
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen = [key for key, _ in pairs]
        twice = next(key for key in seen if seen.count(key) > 1)
        raise yaml.MarkedYAMLError(problem=f"key `{twice}` is written twice", problem_mark=node.start_mark)
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _yaml_problem(exc: yaml.YAMLError) -> str:
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem_mark is not None:
        return f"line {exc.problem_mark.line + 1}: {exc.problem}"
    return "is not valid YAML"


def _unknown_keys(data: object, type_: Any, place: str) -> Iterator[tuple[str, object, list[str]]]:
    """(place, key, known keys) of each key that no Struct field takes."""
    if isinstance(data, Mapping):
        fields = _fields(type_)
        for key, value in data.items():
            if fields is not None and key not in fields:
                yield place, key, list(fields)
            else:
                value_type = fields[key] if fields is not None else _item_type(type_)
                yield from _unknown_keys(value, value_type, f"{place}{key}.")
    elif isinstance(data, list):
        for i, item in enumerate(data):
            yield from _unknown_keys(item, _item_type(type_), f"{place.removesuffix('.')}[{i}].")


def _members(type_: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)


def _fields(type_: Any) -> dict[str, Any] | None:
    """Types of the fields by name, if `type_` is or holds a Struct; None where any key goes."""
    for member in _members(type_):
        if isinstance(member, type) and issubclass(member, msgspec.Struct):
            hints = get_type_hints(member)
            return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(member)}
    return None


def _item_type(type_: Any) -> Any:
    """Type of a container's values."""
    return next((get_args(member)[-1] for member in _members(type_) if get_args(member)), object)


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else f"; known keys: {', '.join(sorted(known))}"


def _problem(text: str) -> str:
    match = _AT.match(text)
    if match is None or match["path"] is None:
        return text[:1].lower() + text[1:]
    place = match["path"].removeprefix("$").removeprefix(".")
    return f"`{place}`: {match['what'][:1].lower()}{match['what'][1:]}"


def _with_secrets(data: Any, source: str) -> Any:
    if isinstance(data, str):
        return _SECRET.sub(lambda match: _secret(match[1], match[2], source), data)
    if isinstance(data, Mapping):
        return {key: _with_secrets(value, source) for key, value in data.items()}
    if isinstance(data, list):
        return [_with_secrets(value, source) for value in data]
    return data


def _secret(kind: str, name: str, source: str) -> str:
    if kind == "env":
        if name not in os.environ:
            raise ConfigError(f"{source}: the environment variable {name} is not set")
        return os.environ[name]
    try:
        return Path(name).read_text("utf-8").strip()
    except OSError as exc:
        raise ConfigError(f"{source}: the secret file {name} cannot be read ({exc.strerror})") from exc
