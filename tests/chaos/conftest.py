"""One cluster for all of chaos: two workers, two copies of every service. Every test leaves it idle."""

import os
from collections.abc import AsyncIterator, Generator, Iterator

import pytest
from support.cluster import Cluster
from support.journal import Journal
from support.watch import Rules, Watch

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
async def watched(cluster: Cluster) -> AsyncIterator[tuple[Client, Watch]]:
    """A client, and a second listener at its inboxes: a broken rule of frames fails the test at its end."""
    async with await cluster.client() as connected, await Watch.beside(connected) as watch:
        yield connected, watch


@pytest.fixture
def client(watched: tuple[Client, Watch]) -> Client:
    return watched[0]


@pytest.fixture
def frames(watched: tuple[Client, Watch]) -> Rules:
    """What the second listener saw of the client's answers."""
    return watched[1].rules


@pytest.fixture
async def journal(cluster: Cluster) -> AsyncIterator[Journal]:
    async with await Journal.of(cluster) as reading:
        yield reading


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Every failure names the seed by which it can be played again."""
    report = yield
    if report.failed and item.get_closest_marker("chaos"):
        report.sections.append(("seed", f"CHAOS_SEED={os.environ.get('CHAOS_SEED', '1')} pytest {item.nodeid}"))
    return report
