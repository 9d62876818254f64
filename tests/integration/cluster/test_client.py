"""The client against a real server and callout: what it is refused is said at once, and by name."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.nats import NatsServer

from prefixbus.bus.connection import NotAdmitted
from prefixbus.bus.errors import BusPermissionDenied
from prefixbus.client import Client

BODY = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path, workers=[]) as running:
        await running.provision()
        await running.callout()
        yield running


@pytest.mark.parametrize(("scope", "named"), [("Hr", "scope Hr of tenant acme"), ("", "tenant acme as a whole")])
async def test_a_scope_that_the_token_may_not_name_is_said_and_not_waited_for(
    server: NatsServer, scope: str, named: str
) -> None:
    token = server.token("acme", ["sales"], label="alice")

    async with await Client.connect(server.url, tenant="acme", token=token, scope=scope, label="alice") as client:
        with pytest.raises(BusPermissionDenied, match=named):
            # Longer than the test may run: waiting for the silence to end would fail it.
            async for _ in client.stream("smollm2", BODY, resend_after_s=60):
                pass


async def test_a_wrong_token_is_said_with_the_tenants_name(server: NatsServer) -> None:
    with pytest.raises(NotAdmitted, match="token not accepted for tenant demo"):
        await Client.connect(server.url, tenant="demo", token="wrong")
