"""What is known about a deployment before and beside its processes: its directory, its ports, whether it is up."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixbus.bus.errors import ConfigInvalid, Unavailable
from prefixbus.cluster import deployment, state


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    state.init(tmp_path / "s", workers=["w1"], models={})
    return tmp_path / "s"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def write_cluster_file(directory: Path, pid: int) -> None:
    content = deployment.ClusterFile(pid, "nats://127.0.0.1:1", 1, 1, "smollm2", {}, {})
    state.write_json(directory / "cluster.json", content)


def test_where_nothing_was_ever_made_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no deployment was made here.*prefixbus up"):
        deployment.read_cluster(tmp_path / "nowhere")


def test_where_nothing_runs_that_is_said(directory: Path) -> None:
    with pytest.raises(Unavailable, match="no deployment is running"):
        deployment.read_cluster(directory)


def test_a_deployment_that_starts_is_not_taken_for_one_that_runs(directory: Path) -> None:
    with state.lock(directory), pytest.raises(Unavailable, match=r"starting.*`up:"):
        deployment.read_cluster(directory)


def test_the_first_up_is_said_to_start_before_it_has_made_anything(tmp_path: Path) -> None:
    with state.lock(tmp_path / "s"), pytest.raises(Unavailable, match="starting"):
        deployment.read_cluster(tmp_path / "s")


def test_what_a_killed_deployment_left_behind_is_not_taken_for_the_one_that_starts(directory: Path) -> None:
    write_cluster_file(directory, pid=os.getpid() + 1)

    with state.lock(directory), pytest.raises(Unavailable, match="starting"):
        deployment.read_cluster(directory)


def test_a_deployment_that_is_up_is_read(directory: Path) -> None:
    write_cluster_file(directory, pid=os.getpid())

    with state.lock(directory):
        assert deployment.read_cluster(directory).nats_url == "nats://127.0.0.1:1"


def test_a_taken_port_that_was_asked_for_is_refused(taken: int) -> None:
    with pytest.raises(Unavailable, match=f"port {taken} is taken"):
        deployment.choose_port(taken)


def test_the_usual_port_gives_way_when_it_is_taken(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "DEFAULT_PORT", taken)

    assert deployment.choose_port(None) != taken


@pytest.mark.parametrize("model", ["nope", ""])
def test_an_unknown_model_is_refused_before_anything_is_made(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigInvalid, match="it has smollm2"):
        deployment.check_config(tmp_path / "s", model)

    assert not (tmp_path / "s").exists()


def test_overrides_of_a_model_that_the_first_up_will_configure_do_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's section is made after the plan is told; an override of it alone lacks the required fields."""
    monkeypatch.setenv("PREFIXBUS_MODELS__SMOLLM2__MAX_MODEL_LEN", "131072")
    monkeypatch.setenv("PREFIXBUS_DIRECTORY__SHARDS", "2")
    planned = deployment.Deployment(tmp_path / "new", deployment.Options(workers=1), print)

    assert "directory of 2 shards" in planned.plan()


@pytest.mark.parametrize(("shards", "said"), [("1", "2 times directory"), ("3", "2 times directory of 3 shards")])
def test_the_plan_counts_replicas_of_each_shard(
    directory: Path, monkeypatch: pytest.MonkeyPatch, shards: str, said: str
) -> None:
    monkeypatch.setenv("PREFIXBUS_DIRECTORY__SHARDS", shards)
    running = deployment.Deployment(directory, deployment.Options(scale={"directory": 2}), lambda line: None)

    assert said in running.plan().split(", ")


def test_the_gateway_takes_the_configs_port_if_it_is_free_and_any_other_if_not(directory: Path, taken: int) -> None:
    with (directory / "config.toml").open("a") as config:
        config.write(f"[gateway]\nport = {taken}\n")

    assert deployment.choose_api_port(directory, None) not in (0, taken)
    with pytest.raises(Unavailable, match="--api-port"):
        deployment.choose_api_port(directory, taken)
