"""`trunkctl keys create|list|revoke`: the API keys of a mesh, in the file that its gateways read again when it changes.

The file holds sha256 of each secret, never the secret: what `create` prints is not to be had again.
"""

import argparse
import datetime
import hashlib
import random
import string
from collections.abc import Sequence
from typing import get_args

import msgspec
from rich.table import Table

from gateway.auth import Key, KeyLimits, KeysFile, Scope
from shared.clock import Clock, SystemClock
from shared.ids import SYSTEM_RNG
from trunkctl.failure import CommandError
from trunkctl.generate import write
from trunkctl.home import Home, find_home, write_private
from trunkctl.options import Subparsers, positive, whole
from trunkctl.tables import show_table

SCOPES: tuple[Scope, ...] = get_args(Scope)
ALPHABET = string.ascii_letters + string.digits
ID_LENGTH = 8
SECRET_LENGTH = 32
MOST_DAYS = 36_500


def add_parser(subparsers: Subparsers) -> None:
    """Adds `keys`."""
    parser = subparsers.add_parser("keys", help="make, list and revoke API keys")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_create(commands)
    commands.add_parser("list", help="list the keys").set_defaults(run=run_list)
    revoke = commands.add_parser("revoke", help="revoke keys")
    revoke.add_argument("id", nargs="+", help="key id, as listed")
    revoke.set_defaults(run=run_revoke)


def _add_create(commands: Subparsers) -> None:
    create = commands.add_parser("create", help="make a key and print its secret, once")
    create.add_argument("--tenant", required=True, help="tenant that the key belongs to")
    create.add_argument("--scope", action="append", choices=SCOPES, help="repeatable (generate, embed, cancel)")
    create.add_argument("--model", action="append", metavar="NAME", help="model it may use; repeatable (all)")
    create.add_argument("--expires-in-days", type=_days, metavar="DAYS", help="days until it expires (never)")
    defaults = KeyLimits()
    create.add_argument("--rpm", type=positive, default=defaults.rpm, help="requests a minute (%(default)s)")
    create.add_argument("--tpm", type=positive, default=defaults.tpm, help="tokens a minute (%(default)s)")
    create.add_argument(
        "--concurrency", type=positive, default=defaults.concurrency, help="requests at once (%(default)s)"
    )
    create.add_argument(
        "--max-priority",
        type=whole(-100, 100),
        default=defaults.max_priority,
        help="highest priority to ask for (%(default)s)",
    )
    create.set_defaults(run=run_create)


def run_create(args: argparse.Namespace) -> int:
    """Prints the secret on standard output."""
    key, secret = make_key(
        SYSTEM_RNG,
        tenant=args.tenant,
        scopes=args.scope or SCOPES[:3],
        models=args.model or ["*"],
        limits=KeyLimits(rpm=args.rpm, tpm=args.tpm, concurrency=args.concurrency, max_priority=args.max_priority),
        expires_at=_expiry(SystemClock(), args.expires_in_days),
    )
    add_key(find_home(args.home), key)
    write(secret + "\n")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Lists the records; there is no secret in them."""
    table = Table(box=None, header_style="dim")
    for name in ("id", "tenant", "scopes", "models", "rpm", "tpm", "concurrency", "priority", "expires"):
        table.add_column(name)
    for key in read_keys(find_home(args.home)):
        limits = (key.limits.rpm, key.limits.tpm, key.limits.concurrency, key.limits.max_priority)
        words = (",".join(key.scopes), ",".join(key.models), *map(str, limits), str(key.expires_at or "never"))
        table.add_row(key.id, key.tenant, *words)
    show_table(table)
    return 0


def run_revoke(args: argparse.Namespace) -> int:
    """Takes the keys out of the file; gateways refuse them as soon as they have read it."""
    home = find_home(args.home)
    keys = read_keys(home)
    if unknown := set(args.id) - {key.id for key in keys}:
        raise CommandError(f"no such key: {', '.join(sorted(unknown))}")
    write_keys(home, [key for key in keys if key.id not in args.id])
    return 0


def ensure_dev_key(home: Home) -> None:
    """Makes the local key where there is none yet: plain in `dev.key`, hashed among the other keys."""
    secret = home.dev_key.read_text().strip() if home.dev_key.exists() else None
    if secret and any(key.sha256 == _digest(secret) for key in read_keys(home)):
        return
    key, secret = make_key(SYSTEM_RNG, tenant="dev", scopes=SCOPES, models=["*"], limits=KeyLimits(), expires_at=None)
    add_key(home, key)
    write_private(home.dev_key, secret.encode() + b"\n")


def make_key(
    rng: random.Random,
    *,
    tenant: str,
    scopes: Sequence[Scope],
    models: Sequence[str],
    limits: KeyLimits,
    expires_at: datetime.datetime | None,
) -> tuple[Key, str]:
    """A new record and its secret, `tl_<id>_<32 letters and digits>`."""
    key_id = "k" + _draw(rng, ID_LENGTH - 1)
    secret = f"tl_{key_id}_{_draw(rng, SECRET_LENGTH)}"
    key = Key(
        id=key_id,
        sha256=_digest(secret),
        tenant=tenant,
        scopes=tuple(scopes),
        models=tuple(models),
        limits=limits,
        expires_at=expires_at,
    )
    return key, secret


def read_keys(home: Home) -> list[Key]:
    """The records; none where there is no file."""
    try:
        return msgspec.json.decode(home.keys.read_bytes(), type=KeysFile).keys
    except FileNotFoundError:
        return []
    except msgspec.DecodeError as error:
        raise CommandError(f"{home.keys}: {error}") from None


def add_key(home: Home, key: Key) -> None:
    """Adds one record to the file."""
    write_keys(home, [*read_keys(home), key])


def write_keys(home: Home, keys: Sequence[Key]) -> None:
    """Replaces the file as a whole, once it is known that gateways will take it."""
    data = msgspec.json.encode(KeysFile(list(keys)))
    try:
        msgspec.json.decode(data, type=KeysFile)
    except msgspec.ValidationError as error:
        raise CommandError(f"gateways would not take this key: {error}") from None
    write_private(home.keys, msgspec.json.format(data, indent=2) + b"\n")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _draw(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(ALPHABET) for _ in range(length))


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days above 0, at most {MOST_DAYS}")
    return days


def _expiry(clock: Clock, days: float | None) -> datetime.datetime | None:
    if days is None:
        return None
    return datetime.datetime.fromtimestamp(round(clock.wall_ms() / 1000 + days * 86_400), datetime.UTC)
