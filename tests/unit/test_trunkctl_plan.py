"""A plan gives every process its own ports and a configuration, and refuses what cannot work."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import GatewayConfig
from router.config import RouterConfig
from shared.config import load
from shared.ports import PortTaken
from trunkctl.failure import CommandError
from trunkctl.home import Home
from trunkctl.plan import Ports, Wish, make_plan
from workers.config import WorkerConfig


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    (home.models / "m").mkdir(parents=True)
    (home.models / "m" / "manifest.json").write_text("{}")
    return home


def wish(**changes: object) -> Wish:
    with Ports() as ports:
        http, grpc = ports.free(), ports.free()
    fields = {
        "model": "m", "workers": 1, "routers": 1, "gateways": 1,
        "http_port": http, "grpc_port": grpc, "redis_url": None, **changes,
    }  # fmt: skip
    return Wish(**fields)  # type: ignore[arg-type]


def test_every_process_has_a_name_and_ports_of_its_own(home: Home) -> None:
    plan = make_plan(home, wish(workers=3, routers=2, gateways=2))
    ports = [port for spec in plan.specs for port in spec.ports.values()]
    assert len(ports) == len(set(ports))
    assert [spec.name for spec in plan.specs] == [
        "redis", "worker-1", "worker-2", "worker-3", "router-1", "router-2", "gateway-1", "gateway-2",
    ]  # fmt: skip


def test_meshes_of_different_homes_look_for_ports_in_different_places(home: Home, tmp_path: Path) -> None:
    places = set()
    for number in range(5):
        other = Home(tmp_path / str(number))
        (other.root).mkdir()
        other.models.symlink_to(home.models)
        redis, *_ = make_plan(other, wish()).specs
        places.add(redis.ports["redis"] // 50)
    assert len(places) > 1


def test_configuration_files_say_what_the_plan_says(home: Home) -> None:
    plan = make_plan(home, wish(workers=2))
    for spec in plan.specs[1:]:
        config = yaml.safe_load((home.run / f"{spec.name}.yaml").read_text())
        assert config["id"] == spec.name
        assert config["redis_url"] == plan.redis_url
        assert {kind: config[f"{kind}_listen"] for kind in spec.ports} == {
            kind: f"127.0.0.1:{port}" for kind, port in spec.ports.items()
        }


def test_every_stage_takes_its_configuration(home: Home) -> None:
    types: dict[str, Any] = {"gateway": GatewayConfig, "router": RouterConfig, "worker": WorkerConfig}
    for spec in make_plan(home, wish()).specs[1:]:
        assert load(home.run / f"{spec.name}.yaml", types[spec.role]).id == spec.name


def test_workers_share_the_cores_and_get_one_at_least(home: Home) -> None:
    cores = len(os.sched_getaffinity(0))
    for workers in (1, cores + 1):
        make_plan(home, wish(workers=workers))
        config = yaml.safe_load((home.run / "worker-1.yaml").read_text())
        assert config["engine"]["threads"] == max(1, cores // workers)


def test_a_store_of_ones_own_is_used_and_none_is_started(home: Home) -> None:
    plan = make_plan(home, wish(redis_url="redis://elsewhere:6379/3"))
    assert plan.redis_url == "redis://elsewhere:6379/3"
    assert [spec.role for spec in plan.specs] == ["worker", "router", "gateway"]


def test_a_taken_port_is_named_with_the_process_that_holds_it(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(PortTaken) as refused:
            make_plan(home, wish(http_port=port))
    assert str(port) in str(refused.value)
    assert str(os.getpid()) in str(refused.value)


def test_a_port_that_just_closed_counts_as_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the server's side goes to TIME_WAIT
        client.close()
    with Ports() as ports:
        assert ports.fixed(port) == port


def test_a_model_that_is_not_there_is_refused_with_the_command_that_brings_it(home: Home) -> None:
    with pytest.raises(CommandError, match="model fetch"):
        make_plan(home, wish(model="absent"))
