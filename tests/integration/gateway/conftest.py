"""One cluster for all tests of the gateway: two workers, one gateway. Tests leave it idle and whole."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from openai import AsyncOpenAI
from support.cluster import Cluster

from .gateway_world import World, running


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    environ = {"PREFIXBUS_BRIDGE__TELLS_WORKER": "true"}
    with Cluster(tmp_path_factory.mktemp("gateway"), "--workers", "2", environ=environ) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture
async def openai(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=cluster.api, api_key=cluster.key, max_retries=0) as client:
        yield client


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    """A plain HTTP client with the demo tenant's key."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {cluster.key}"}) as session:
        yield session


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A gateway with everything behind it scripted; settings of its config by `@pytest.mark.parametrize(indirect)`."""
    async with running(tmp_path, **getattr(request, "param", {})) as made:
        yield made


@pytest.fixture
async def scripted(world: World) -> AsyncIterator[AsyncOpenAI]:
    """The official client of that gateway."""
    async with AsyncOpenAI(base_url=world.api, api_key=world.key, max_retries=0) as client:
        yield client
