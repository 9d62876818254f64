"""TLS on the bus and on every HTTP port, with self-made certificates: a whole cluster, and who is turned away."""

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import trustme
from support.cluster import MODEL, Cluster, ask, chat

from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import BusUnavailable
from prefixbus.client import Client
from prefixbus.cluster import deployment


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("tls"), "--workers", "1")
    running.init()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(running.state / "creds" / "server.pem")
    issued.private_key_pem.write_to_path(running.state / "creds" / "server-key.pem")
    authority.cert_pem.write_to_path(running.state / "creds" / "ca.pem")
    with (running.state / "config.toml").open("a") as config:
        config.write('\n[tls]\ncertificate = "creds/server.pem"\nkey = "creds/server-key.pem"\nca = "creds/ca.pem"\n')
    with running:
        yield running
        assert running.stop() == 0


async def test_a_request_goes_through_and_the_ports_are_https(cluster: Cluster) -> None:
    async with await cluster.client() as client:
        answer = await ask(client, chat("Is this private?", max_tokens=3))

    assert answer.text
    files = deployment.run_files(cluster.state)
    assert files
    assert all(file.http.startswith("https://127.0.0.1:") for file in files)
    assert all(cluster.is_ready(file.pid) for file in files)
    # Read from the metrics of each.
    await cluster.settles()


async def test_the_gateway_answers_over_https_and_reaches_the_bus_by_tls(cluster: Cluster) -> None:
    assert cluster.api.startswith("https://127.0.0.1:")
    headers = {"Authorization": f"Bearer {cluster.key}"}
    body = {"model": MODEL, **chat("Is this private, too?", max_tokens=3)}

    async with aiohttp.ClientSession(headers=headers) as session:
        url, tls = f"{cluster.api}/chat/completions", deployment.tls_of(cluster.state)
        async with session.post(url, json=body, ssl=tls or False) as response:
            content = await response.json()

    assert response.status == 200
    assert content["choices"][0]["message"]["content"]


async def test_plain_connections_are_turned_away(cluster: Cluster) -> None:
    with pytest.raises(BusUnavailable):
        await Bus.connect(
            cluster.url,
            name="plain",
            inbox_prefix="_INBOX.demo.x",
            user="demo",
            password=cluster.token,
            connect_timeout_s=2,
        )


def test_plain_http_is_turned_away(cluster: Cluster) -> None:
    for file in deployment.run_files(cluster.state):
        with pytest.raises(OSError):
            urllib.request.urlopen(file.http.replace("https://", "http://") + "/metrics", timeout=5)


@pytest.fixture
def stranger(tmp_path: Path) -> ssl.SSLContext:
    """Trusts another CA alone."""
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    return ssl.create_default_context(cafile=str(tmp_path / "other.pem"))


async def test_a_bus_that_another_ca_vouches_for_is_not_trusted(cluster: Cluster, stranger: ssl.SSLContext) -> None:
    with pytest.raises(BusUnavailable, match=r"(?i)certificate"):
        await Client.connect(cluster.url, tenant="demo", token=cluster.token, tls=stranger)


def test_an_http_port_that_another_ca_vouches_for_is_not_trusted(cluster: Cluster, stranger: ssl.SSLContext) -> None:
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(deployment.run_files(cluster.state)[0].http + "/readyz", timeout=5, context=stranger)
