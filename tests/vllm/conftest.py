"""Real engines, started once for all tests: two of a deployment. Everything here runs with `make test-vllm` alone."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.vllm import VllmCluster

from prefixbus.bus.connection import Bus
from prefixbus.client import Client

from .narrow import Narrow
from .seers import WithSeer

HERE = Path(__file__).parent
# A test's own limit: prefill of the tiny model is fast, and the machine may be doing other things.
TIMEOUT_S = 120


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Before the marks are looked at.
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    """`prefixbus up` with two engines, and a config for more that may join; tests leave it idle, and share its caches:
    ask what no other test asks."""
    with WithSeer(tmp_path_factory.mktemp("vllm"), "--workers", "2") as running:
        yield running


@pytest.fixture
async def client(cluster: VllmCluster) -> AsyncIterator[Client]:
    """As the demo tenant."""
    async with await cluster.client() as connected:
        yield connected


@pytest.fixture
async def operator(cluster: VllmCluster) -> AsyncIterator[Bus]:
    bus = await cluster.operator()
    yield bus
    await bus.close()


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Narrow]:
    """One engine with little room; tests leave it idle."""
    with Narrow(tmp_path_factory.mktemp("narrow")) as running:
        yield running


@pytest.fixture
async def narrow_client(narrow: Narrow) -> AsyncIterator[Client]:
    """As the demo tenant."""
    async with await narrow.client() as connected:
        yield connected


@pytest.fixture
async def narrow_operator(narrow: Narrow) -> AsyncIterator[Bus]:
    bus = await narrow.operator()
    yield bus
    await bus.close()
