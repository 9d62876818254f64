"""The callout without a server: whatever arrives, the answer is a yes for the right credential or a no."""

import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nkeys
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixbus.auditor import callout, jwt, tenants, xkey
from prefixbus.bus import secretfile
from prefixbus.bus.clock import VirtualClock

TOKEN = tenants.new_token(bytes(32))
OURS, SERVERS = xkey.new_seed(bytes([1]) * 32), xkey.new_seed(bytes([2]) * 32)
SERVERS_KEY = xkey.public_key(SERVERS)
SERVER = nkeys.from_seed(bytearray(nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_SERVER)))
USER = nkeys.from_seed(bytearray(nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER))).public_key.decode()
ISSUER = jwt.Issuer(nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_ACCOUNT))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "tenants.json"
    write(found, "acme")
    return found


def write(path: Path, *names: str) -> None:
    """A tenants file in which each of these has the same token's next letter (the first has TOKEN)."""
    credentials = tuple(
        tenants.Credential(tenant=name, label="x", token_hash=tenants.hash_token(TOKEN + "x" * number))
        for number, name in enumerate(names)
    )
    path.write_bytes(tenants.encode(tenants.TenantsFile(version=1, credentials=credentials)))
    path.chmod(0o600)


def make(path: Path, results: list[str] | None = None) -> callout.Callout:
    return callout.Callout(
        issuer=ISSUER,
        xkey_seed=OURS,
        tenants=callout.TenantsOnDisk(path),
        clock=VirtualClock(),
        entropy=os.urandom,
        on_result=(results if results is not None else []).append,
    )


def sealed(user: str = "acme", password: str = TOKEN, server_xkey: str = SERVERS_KEY) -> bytes:
    claims = {
        "iss": SERVER.public_key.decode(),
        "nats": {
            "server_id": {"id": SERVER.public_key.decode(), "xkey": server_xkey},
            "user_nkey": USER,
            "connect_opts": {"user": user, "pass": password},
            "type": "authorization_request",
        },
    }
    head = jwt._b64(b'{"typ":"JWT","alg":"ed25519-nkey"}') + b"." + jwt._b64(json.dumps(claims).encode())
    request = head + b"." + jwt._b64(SERVER.sign(head))
    return xkey.seal(SERVERS, xkey.public_key(OURS), request, os.urandom(24))


def opened(answer: bytes | None) -> dict[str, Any]:
    assert answer is not None
    payload, _ = jwt.verify(xkey.unseal(SERVERS, xkey.public_key(OURS), answer))
    found: dict[str, Any] = json.loads(payload)["nats"]
    return found


def test_the_right_credential_gets_a_user(path: Path) -> None:
    results: list[str] = []
    service = make(path, results)

    assert "jwt" in opened(service.answer(sealed(), SERVERS_KEY))
    assert results == ["allowed"]


@pytest.mark.parametrize(("user", "password"), [("acme", ""), ("acme", "x"), ("", TOKEN), ("other", TOKEN), ("", "")])
def test_a_wrong_one_gets_the_same_refusal_whatever_is_wrong(path: Path, user: str, password: str) -> None:
    service = make(path)

    answer = opened(service.answer(sealed(user, password), SERVERS_KEY))

    assert answer["error"] == "unknown tenant or wrong token"
    assert service.counts == {"allowed": 0, "denied": 1, "failed": 0}


def test_a_request_in_the_clear_is_not_answered(path: Path) -> None:
    service = make(path)
    plain = xkey.unseal(OURS, SERVERS_KEY, sealed())

    assert service.answer(plain, "") is None
    assert service.answer(plain, SERVERS_KEY) is None
    assert service.counts["failed"] == 2


def test_a_request_sealed_by_another_than_the_server_in_it_is_not_answered(path: Path) -> None:
    assert make(path).answer(sealed(server_xkey=xkey.public_key(OURS)), SERVERS_KEY) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), key=st.sampled_from([SERVERS_KEY, "", "X"]))
def test_no_bytes_break_it(path: Path, data: bytes, key: str) -> None:
    assert make(path).answer(data, key) is None
    as_sealed = xkey.seal(SERVERS, xkey.public_key(OURS), data, bytes(24))
    assert make(path).answer(as_sealed, SERVERS_KEY) is None


def test_the_file_is_read_again_when_it_changes_and_only_then(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = callout.TenantsOnDisk(path)
    reads = 0
    real = secretfile.read

    def read(where: Path) -> bytes:
        nonlocal reads
        reads += 1
        return real(where)

    monkeypatch.setattr(secretfile, "read", read)
    for _ in range(3):
        assert source.current().verify("late", TOKEN + "x", 0) is None
    assert reads == 1
    write(path, "acme", "late")

    assert source.current().verify("late", TOKEN + "x", 0) is not None
    assert reads == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"{"),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: path.chmod(0o644),
        lambda path: path.write_bytes(b'{"version": 2, "credentials": []}'),
    ],
    ids=["not JSON", "empty", "gone", "open to others", "another version"],
)
def test_a_file_that_cannot_be_used_denies_everybody_until_it_can(path: Path, spoil: Callable[[Path], object]) -> None:
    service = make(path)
    assert "jwt" in opened(service.answer(sealed(), SERVERS_KEY))

    spoil(path)

    assert "error" in opened(service.answer(sealed(), SERVERS_KEY))
    assert service.not_ready_because() != ""
    path.unlink(missing_ok=True)
    write(path, "acme")
    assert "jwt" in opened(service.answer(sealed(), SERVERS_KEY))
    assert service.not_ready_because() == ""


class Line:
    """A bus that hands over one message and keeps what is published."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.handle: Callable[[Any], Awaitable[None]]
        self.where: tuple[str, str] = ("", "")

    async def publish(self, subject: str, payload: bytes = b"") -> None:
        if subject == "broken":
            raise RuntimeError(f"cannot send {TOKEN}")
        self.sent.append((subject, payload))

    async def subscribe(self, subject: str, callback: Callable[[Any], Awaitable[None]], *, queue: str = "") -> object:
        self.where, self.handle = (subject, queue), callback
        return object()


class Message:
    def __init__(self, data: Any, reply: str, headers: dict[str, str] | None) -> None:
        self.data, self.reply, self.headers = data, reply, headers


async def test_no_error_ends_the_service_and_no_log_line_holds_a_token(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    line, service = Line(), make(path)
    await callout.serve(line, service)
    header = {"Nats-Server-Xkey": SERVERS_KEY}

    await line.handle(Message(sealed(), "broken", header))
    await line.handle(Message(None, "reply", header))
    await line.handle(Message(sealed(TOKEN, TOKEN + "wrong"), "reply", header))
    await line.handle(Message(b"junk", "reply", None))
    await line.handle(Message(sealed(), "reply", header))

    assert line.where == ("$SYS.REQ.USER.AUTH", "callout")
    assert [("jwt" in opened(payload)) for _, payload in line.sent] == [False, True]
    assert service.counts == {"allowed": 2, "denied": 1, "failed": 3}
    assert TOKEN not in caplog.text
