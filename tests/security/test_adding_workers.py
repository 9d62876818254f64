"""A worker joins or leaves a running server: its key comes or goes with a reload, and nobody else notices."""

from pathlib import Path

import pytest
from support.nats import NatsServer, eventually

from prefixbus.bus import subjects
from prefixbus.cluster import state


async def test_a_new_worker_connects_after_a_reload_and_the_services_live_on(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, ["w1"]) as server:
        await server.provision()
        old = [await server.probe("worker_bridge", "w1"), await server.probe("tokenizer"), await server.probe("router")]

        assert state.add_worker(server.state, "w9")
        await server.reload()
        joined = await server.bus("worker_bridge", "w9")

        assert await joined.publish_acked("$KV.WORKERS.w9", b"{}") > 0
        for probe in old:
            assert await probe.denials() == []
            assert probe.client.is_connected


async def test_a_tenant_comes_back_by_itself_after_a_reload(tmp_path: Path) -> None:
    """The server closes connections that came through the callout; what matters is that no client has to be restarted
    and no service notices."""
    async with NatsServer(tmp_path, ["w1"]) as server:
        await server.callout()
        tokenizer, tenant = await server.probe("tokenizer"), await server.tenant_bus("demo", server.demo.token)
        changes: list[bool] = []
        tenant.on_connection_change.append(changes.append)
        heard: list[object] = []

        async def hear(message: object) -> None:
            heard.append(message)

        await tenant.subscribe("_INBOX.demo.r1", hear)
        state.add_worker(server.state, "w2")
        await server.reload()
        await eventually(lambda: changes == [False, True], "the tenant's reconnect")
        await tenant.flush()
        await tokenizer.client.publish("_INBOX.demo.r1", b"frame")

        await eventually(lambda: len(heard) == 1, "a frame at the tenant")


async def test_a_worker_whose_key_is_gone_is_cut_off(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, ["w1", "w2"]) as server:
        staying, leaving = await server.probe("worker_bridge", "w1"), await server.probe("worker_bridge", "w2")

        (server.state / "creds" / "worker_bridge-w2.nk").unlink()
        await server.reload()

        await eventually(lambda: leaving.client.is_closed, "the end of its connection")
        assert await staying.may_publish(subjects.load("w1"))


async def test_a_worker_without_a_key_is_refused(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, ["w1"]) as server:
        await server.callout()
        state.add_worker(server.state, "w2")

        with pytest.raises(Exception, match="Authorization Violation"):
            await server.probe("worker_bridge", "w2")
