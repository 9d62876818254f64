"""One cluster for all tests of the path, with two copies of every service; and one whose model knows tools."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster
from support.models import CHATML_WITH_TOOLS

from prefixbus.bus.connection import Bus
from prefixbus.client import Client

TOOLS_MODEL = "smollm2-tools"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Twice the services, two workers. Tests leave it idle."""
    scale = "tokenizer=2,router=2,directory=2,auditor=2"
    with Cluster(tmp_path_factory.mktemp("cluster"), "--workers", "2", "--scale", scale) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="session")
def tools_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker that serves SmolLM2's tokens with a ChatML template that knows tools; its engine finds their calls."""
    running = Cluster(tmp_path_factory.mktemp("tools"), "--workers", "1", "--model", TOOLS_MODEL)
    running.init()
    _add_tools_model(running.state)
    with running:
        yield running
        assert running.stop() == 0


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with await cluster.client() as connected:
        yield connected


@pytest.fixture
async def operator(cluster: Cluster) -> AsyncIterator[Bus]:
    bus = await cluster.operator()
    yield bus
    await bus.close()


def _add_tools_model(state: Path) -> None:
    models = state / "models"
    shutil.copytree(models / "smollm2", models / TOOLS_MODEL)
    path = models / TOOLS_MODEL / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": CHATML_WITH_TOOLS}))
    config = state / "config.toml"
    config.write_text(
        f'{config.read_text()}\n[models.{TOOLS_MODEL}]\ntokenizer = "models/{TOOLS_MODEL}"\n'
        'model_revision = "sha256:of-the-same-weights"\nprofile = "instant"\ntool_parser = "hermes"\n'
    )
