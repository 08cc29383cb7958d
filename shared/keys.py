"""Names of every Redis key. The one rule: nobody writes a key's name elsewhere.

Braces are hash tags: keys that one script touches share a tag. Tenants and models are names chosen by people, so what
could end a tag early is escaped; what follows the tag needs no escape.
"""

from __future__ import annotations

from typing import Final

BIRTH: Final = "tl:birth"


def _tag(name: str) -> str:
    return "{" + name.replace("%", "%25").replace("}", "%7D") + "}"


def req(id_hex: str) -> str:
    """Hash: record of a request."""
    return f"tl:req:{{{id_hex}}}"


def out(id_hex: str) -> str:
    """Stream: outputs of a resumable request."""
    return f"tl:out:{{{id_hex}}}"


def own(incarnation: str) -> str:
    """Set: what a gateway's incarnation (16 hexadecimal digits) owns, as `id:tenant`."""
    return f"tl:own:{{{incarnation}}}"


def owners() -> str:
    """Sorted set: incarnations of gateways that may own requests, by when they were last heard (ms, store's clock)."""
    return "tl:owners"


def alias(tenant: str, client_id: str) -> str:
    """String: request id behind a client's own id."""
    return f"tl:alias:{_tag(tenant)}:{client_id}"


def idem(tenant: str, key: str) -> str:
    """Hash: claim of an idempotency key."""
    return f"tl:idem:{_tag(tenant)}:{key}"


def lim(tenant: str) -> str:
    """Hash: limit clocks and reservations of a tenant."""
    return f"tl:lim:{_tag(tenant)}"


def birth() -> str:
    """String: random id of this data set."""
    return BIRTH


def lost() -> str:
    """String: when this data set took another's place (ms, store's clock); absent if it is the first."""
    return f"tl:lost:{{{BIRTH}}}"


def peer(role: str, peer_id: str) -> str:
    """Hash: registration of one process."""
    return f"tl:peer:{{{role}}}:{peer_id}"


def peers(role: str) -> str:
    """Sorted set: ids registered for a role, by expiry in milliseconds of the store's clock."""
    return f"tl:peers:{{{role}}}"


def trace(trace_id: str) -> str:
    """List: spans of one trace as JSON, in development."""
    return f"tl:trace:{trace_id}"


def roll(model: str) -> str:
    """Hash: rollout of a model."""
    return f"tl:roll:{_tag(model)}"
