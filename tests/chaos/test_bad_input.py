"""Bad input over the bus: one ending frame with a stable code and a sentence that helps; the service lives on."""

import asyncio
import json
import math
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from support.cluster import MODEL, Cluster, chat

from prefixbus.bus import errors

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

SUBJECT = f"pb.v1.infer.demo.{MODEL}"
FINE = chat("Fine?", max_tokens=1)
KNOWN_CODES = {cls.code for cls in errors.all_errors()}


class Asker:
    """A plain client whose requests may be made from synchronous tests, one after another."""

    def __init__(self, cluster: Cluster) -> None:
        self._runner = asyncio.Runner()
        self._cluster = cluster
        self._connection: Nats = self._runner.run(self._connect())

    async def _connect(self) -> Nats:
        return await nats.connect(
            self._cluster.url, user="demo", password=self._cluster.token, inbox_prefix=b"_INBOX.demo"
        )

    def ask(self, body: bytes, *, headers: dict[str, str] | None = None, subject: str = SUBJECT) -> list[Msg]:
        """All frames up to the ending one, and a turn longer: there must be one end."""

        async def work() -> list[Msg]:
            inbox = self._connection.new_inbox()
            subscription = await self._connection.subscribe(inbox)
            await self._connection.publish(subject, body, reply=inbox, headers=headers)
            frames = [await subscription.next_msg(timeout=15)]
            while frames[-1].data:
                frames.append(await subscription.next_msg(timeout=15))
            await self._connection.flush()
            assert subscription.pending_msgs == 0, "something came after the end"
            await subscription.unsubscribe()
            return frames

        return self._runner.run(work())

    def close(self) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()


@pytest.fixture(scope="module")
def asker(cluster: Cluster) -> Iterator[Asker]:
    opened = Asker(cluster)
    processes = dict(cluster.file.processes)
    yield opened
    opened.close()
    asyncio.run(cluster.settles())
    assert cluster.file.processes == processes, "nothing ended, and was started again"


def error_of(frames: list[Msg]) -> tuple[str, str]:
    """(code, sentence) of an answer that is one ending frame."""
    headers = frames[0].headers or {}
    assert len(frames) == 1, [frame.data[:80] for frame in frames]
    assert headers["Pb-Final"] == "1"
    assert headers["Pb-Error"] in KNOWN_CODES
    assert 400 <= int(headers["Nats-Service-Error-Code"]) < 600
    return headers["Pb-Error"], headers["Nats-Service-Error"]


def routed_requests(cluster: Cluster) -> float:
    """How many requests tokenizers have handed to a router."""
    return cluster.metrics("tokenizer").get('prefixbus_tokenizer_requests_total{code="ok"}', 0.0)


def is_not_retried(frames: list[Msg]) -> bool:
    """Whether an answer that ends with an error that another try cannot mend was tried once."""
    headers = frames[-1].headers or {}
    kind = errors.by_code(headers.get("Pb-Error", errors.Unavailable.code))
    return kind.retryable or headers.get("Pb-Attempt", "1") == "1"


def body(**fields: Any) -> bytes:
    return json.dumps({**FINE, **fields}).encode()


def nested(depth: int) -> bytes:
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


CASES: dict[str, tuple[bytes, dict[str, str], str, str]] = {
    # name: body, headers, code, what the sentence names
    "not JSON": (b"hello", {}, "invalid_json", "JSON"),
    "half a JSON": (b'{"messages": [', {}, "invalid_json", "JSON"),
    "a list": (b"[1]", {}, "invalid_json", "object"),
    "nothing": (b"", {}, "invalid_json", "JSON"),
    "invalid UTF-8": (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', {}, "invalid_json", "UTF-8"),
    "10,000 nested arrays": (nested(10_000), {}, "invalid_json", ""),
    "1,015 nested arrays as a model": (
        b'{"model": ' + b"[" * 1015 + b"]" * 1015 + b', "messages": []}',
        {},
        "model_mismatch",
        "model",
    ),
    "a model that is no text": (body(model=[]), {}, "model_mismatch", "model"),
    "body and subject disagree": (body(model="another"), {}, "model_mismatch", "another"),
    "no messages": (b"{}", {}, "bad_request", "messages"),
    "empty messages": (body(messages=[]), {}, "bad_request", "messages"),
    "messages of a wrong type": (body(messages="hi"), {}, "bad_request", "messages"),
    "a message of a wrong type": (body(messages=["hi"]), {}, "bad_request", "messages"),
    "a role of a wrong type": (body(messages=[{"role": 7, "content": "x"}]), {}, "bad_request", "role"),
    "content of a wrong type": (body(messages=[{"role": "user", "content": 7}]), {}, "bad_request", "content"),
    "max_tokens of a wrong type": (body(max_tokens="many"), {}, "bad_request", "max_tokens"),
    "no tokens at all": (body(max_tokens=0), {}, "bad_request", "max_tokens"),
    "a temperature that is not a number": (
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        {},
        "invalid_json",
        "",
    ),
    "a temperature out of range": (body(temperature=-1), {}, "bad_request", "temperature"),
    "an enormous integer": (body(seed=10**400), {}, "invalid_json", "infinity"),
    "a prompt over the model's length": (
        body(messages=[{"role": "user", "content": "a b " * 9000}]),
        {},
        "context_too_long",
        "8192",
    ),
    "an image": (
        body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        {},
        "unsupported",
        "image_url",
    ),
    "a body over the limit": (body(user="x" * (4 * 1024 * 1024)), {}, "too_large", "4194304"),
    "a 20 KB header block": (body(), {"X-Big": "x" * 20_000}, "headers_too_large", "16384"),
    "a 1 MB header block": (body(), {"X-Big": "x" * 1_000_000}, "headers_too_large", "16384"),
    "an expired deadline": (body(), {"Pb-Deadline": "1000"}, "deadline_exceeded", ""),
    "a deadline that is none": (body(), {"Pb-Deadline": "soon"}, "bad_request", "Pb-Deadline"),
    "a deadline at infinity": (body(), {"Pb-Deadline": "inf"}, "bad_request", "Pb-Deadline"),
    "a request id that cannot stand in a subject": (body(), {"Pb-Request-Id": "a b"}, "bad_request", "Pb-Request-Id"),
    "an unknown prefix class": (body(), {"Pb-Prefix-Class": "novel"}, "bad_request", "Pb-Prefix-Class"),
    "an empty cache salt": (body(cache_salt=""), {}, "bad_request", "cache_salt"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_bad_input_gets_one_ending_frame_that_helps(cluster: Cluster, asker: Asker, case: str) -> None:
    sent, headers, code, named = CASES[case]
    routed = routed_requests(cluster)

    found, sentence = error_of(asker.ask(sent, headers=headers or None))

    assert found == code, sentence
    assert named in sentence
    assert "\n" not in sentence
    assert routed_requests(cluster) == routed, "what cannot work is given to nobody"


def test_an_unknown_model_names_those_that_are_served(asker: Asker) -> None:
    code, sentence = error_of(asker.ask(body(), subject="pb.v1.infer.demo.nobody"))

    assert code == "unknown_model"
    assert MODEL in sentence


def test_after_all_of_it_the_service_answers(asker: Asker) -> None:
    frames = asker.ask(body())

    assert len(frames) > 1
    assert "Pb-Error" not in (frames[-1].headers or {})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    *(
        "messages",
        "model",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stop",
        "stream",
        "stream_options",
        "temperature",
    ),
    *("top_p", "top_k", "min_p", "seed", "tools", "tool_choice", "documents", "response_format", "logit_bias", "user"),
    *("cache_salt", "prompt", "presence_penalty", "stop_token_ids", "min_tokens", "chat_template_kwargs", "logprobs"),
]


def sent_of(value: Any) -> bytes:
    return json.dumps(value, allow_nan=True).encode("utf-8", "surrogatepass")


@given(fields=st.dictionaries(st.sampled_from(FIELDS), json_values, min_size=1, max_size=4))
def test_any_value_in_any_field_is_answered_or_refused_by_name(asker: Asker, fields: dict[str, Any]) -> None:
    bounded = {**FINE, **fields}
    if not isinstance(bounded.get("max_tokens"), int) or math.fabs(bounded["max_tokens"]) > 4:
        bounded["max_tokens"] = 1

    frames = asker.ask(sent_of(bounded))

    headers = frames[-1].headers or {}
    assert headers["Pb-Final"] == "1"
    assert headers.get("Pb-Error", "invalid_json") in KNOWN_CODES - {"internal", "engine_failed", "worker_lost"}
    assert is_not_retried(frames)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused(asker: Asker, data: bytes) -> None:
    code, _ = error_of(asker.ask(data))

    assert code in ("invalid_json", "bad_request")


@given(
    headers=st.dictionaries(
        st.sampled_from(
            ["Pb-Request-Id", "Pb-Deadline", "Pb-Prefix-Class", "traceparent", "Pb-Final", "Pb-Seq", "Status"]
        ),
        st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_categories=["Cs"]), max_size=30),
        min_size=1,
    )
)
def test_any_header_is_taken_or_refused_by_name(asker: Asker, headers: dict[str, str]) -> None:
    frames = asker.ask(body(), headers=headers)

    assert (frames[-1].headers or {})["Pb-Final"] == "1"
    assert (frames[-1].headers or {}).get("Pb-Error", "bad_request") in KNOWN_CODES - {"internal"}


@pytest.mark.parametrize("subject", [SUBJECT, "pb.v1.cancel.demo.x"])
def test_a_header_block_that_is_not_utf_8_deafens_nobody(cluster: Cluster, asker: Asker, subject: str) -> None:
    address = urlsplit(cluster.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=5) as raw:
        raw.recv(65536)
        login = {"user": "demo", "pass": cluster.token, "headers": True, "verbose": False, "pedantic": False}
        block = b"NATS/1.0 \xff\xff\xff\r\n\r\n"
        publish = f"HPUB {subject} _INBOX.demo.raw {len(block)} {len(block)}\r\n".encode() + block + b"\r\n"
        for command in (b"CONNECT " + json.dumps(login).encode() + b"\r\n", publish, publish, publish):
            raw.sendall(command + b"PING\r\n")
            assert b"PONG" in raw.recv(65536)

    for _ in range(6):
        assert "Pb-Error" not in (asker.ask(body())[-1].headers or {})
