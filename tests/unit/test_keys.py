from __future__ import annotations

from binascii import crc_hqx

from shared import keys


def slot(key: str) -> int:
    """The cluster's slot of a key: crc16 of what is between the first { and the next }."""
    _, brace, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return crc_hqx((tag if brace and closed and tag else key).encode(), 0) % 16384


def test_keys_have_the_published_names() -> None:
    assert keys.req("ab12") == "tl:req:{ab12}"
    assert keys.out("ab12") == "tl:out:{ab12}"
    assert keys.own("00ff") == "tl:own:{00ff}"
    assert keys.alias("dev", "mine") == "tl:alias:{dev}:mine"
    assert keys.idem("dev", "k1") == "tl:idem:{dev}:k1"
    assert keys.lim("dev") == "tl:lim:{dev}"
    assert keys.birth() == "tl:birth"
    assert keys.lost() == "tl:lost:{tl:birth}"
    assert keys.peer("worker", "w0") == "tl:peer:{worker}:w0"
    assert keys.peers("worker") == "tl:peers:{worker}"
    assert keys.trace("0af7") == "tl:trace:0af7"
    assert keys.roll("smollm2") == "tl:roll:{smollm2}"


def test_keys_that_one_script_touches_are_in_one_slot() -> None:
    assert slot(keys.req("ab12")) == slot(keys.out("ab12"))
    assert slot(keys.birth()) == slot(keys.lost())
    assert slot(keys.peer("worker", "w{0}")) == slot(keys.peers("worker"))


def test_no_tenant_and_client_id_can_name_another_tenants_alias() -> None:
    tenants = ["a", "a}:b", "a}", "{a", "a%7D:b", "a%257D:b", ""]
    ids = ["c", "b}:c", "}:c", "%7D:c", ":c", "{a}:c"]
    named = [keys.alias(tenant, client_id) for tenant in tenants for client_id in ids]
    assert len(set(named)) == len(named)
