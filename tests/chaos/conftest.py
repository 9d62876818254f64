"""One cluster for all of chaos: two workers, two copies of every service. Every test leaves it idle."""

import os
from collections.abc import AsyncIterator, Generator, Iterator

import pytest
from support.cluster import Cluster

from prefixbus.client import Client


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(
        tmp_path_factory.mktemp("chaos"),
        *("--workers", "2", "--scale", "tokenizer=2,router=2,directory=2,auditor=2"),
    )
    running.start()
    yield running
    running.stop()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with await cluster.client() as connected:
        yield connected


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Every failure names the seed by which it can be played again."""
    report = yield
    if report.failed and item.get_closest_marker("chaos"):
        report.sections.append(("seed", f"CHAOS_SEED={os.environ.get('CHAOS_SEED', '1')} pytest {item.nodeid}"))
    return report
