"""One real nats-server for the suite; connections are made and closed by each test."""

from collections.abc import AsyncIterator, Iterator

import pytest
from support.nats import NatsServer, RunningCallout

WORKERS = ["w1", "w2"]


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    running = NatsServer(tmp_path_factory.mktemp("nats"), WORKERS)
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
async def server(shared_server: NatsServer) -> AsyncIterator[NatsServer]:
    yield shared_server
    await shared_server.close_connections()


@pytest.fixture
async def provisioned(server: NatsServer) -> NatsServer:
    """The server with all streams and buckets."""
    await server.provision()
    return server


@pytest.fixture
async def callout(server: NatsServer) -> RunningCallout:
    return await server.callout()
