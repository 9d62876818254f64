"""Captured requests, sent again."""

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from prefixbus.bus import ids
from prefixbus.bus.errors import Overloaded
from prefixbus.bus.messages import Captured, Outcome
from prefixbus.client import Client
from prefixbus.cluster import resend
from prefixbus.cluster.resend import Again

WALL = 1_700_000_000.0


class FakeClient:
    """Takes requests of its scope; those for the model `full` end with an error."""

    def __init__(self, scope: str, taken: list[tuple[str, str, dict[str, Any], str]]) -> None:
        self._scope = scope
        self._taken = taken

    async def stream(
        self, model: str, body: dict[str, Any], *, request_id: str, prefix_class: str
    ) -> AsyncIterator[None]:
        self._taken.append((self._scope, request_id, body, prefix_class))
        if model == "full":
            raise Overloaded()
        yield None


def captured(number: int, at: float, *, scope: str = "", model: str = "m") -> Captured:
    request_id = ids.request_id(WALL + at, bytes([number] * 10))
    return Captured(1, request_id, f"c{number}", "acme", scope, model, "rag", msgspec.Raw(b'{"n":%d}' % number))


def outcome(**changed: Any) -> Outcome:
    made = Outcome(
        1, "R", "c", 1, "w1", 1, "acme", "m", "", "ok", "", "rag", "", 9, 0, 32, None, 1, None, 20.0, 50.0, WALL
    )
    return msgspec.structs.replace(made, **changed)


@pytest.mark.parametrize(
    ("in_time", "waits"), [(True, [0.0, 1.5, 4.0]), (False, [])], ids=["in time", "as soon as possible"]
)
async def test_they_go_at_their_original_distances_or_at_once(
    in_time: bool, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(round(seconds, 6))

    monkeypatch.setattr("prefixbus.cluster.resend.asyncio.sleep", wait)
    monkeypatch.setattr("prefixbus.cluster.resend.time.monotonic", lambda: 77.0)
    requests = [captured(1, 0.0), captured(2, 1.5), captured(3, 4.0)]
    taken: list[tuple[str, str, dict[str, Any], str]] = []
    clients = {"": cast(Client, FakeClient("", taken))}

    await resend._send_all(clients, requests, [Again(one.request_id, None) for one in requests], in_time=in_time)

    assert waited == waits
    assert sorted(body["n"] for _, _, body, _ in taken) == [1, 2, 3]


async def test_each_keeps_its_body_scope_and_class_and_gets_an_id_of_its_own() -> None:
    requests = [captured(1, 0.0, scope="hr"), captured(2, 0.0)]
    taken: list[tuple[str, str, dict[str, Any], str]] = []
    clients = {scope: cast(Client, FakeClient(scope, taken)) for scope in ("hr", "")}

    async with asyncio.timeout(5):
        await resend._send_all(clients, requests, [Again(one.request_id, None) for one in requests], in_time=False)

    assert taken == [
        ("hr", f"again-{requests[0].request_id}", {"n": 1}, "rag"),
        ("", f"again-{requests[1].request_id}", {"n": 2}, "rag"),
    ]


async def test_one_that_fails_is_told_and_stops_no_other() -> None:
    requests = [captured(1, 0.0, model="full"), captured(2, 0.0)]
    sent = [Again(one.request_id, None) for one in requests]
    taken: list[tuple[str, str, dict[str, Any], str]] = []

    await resend._send_all({"": cast(Client, FakeClient("", taken))}, requests, sent, in_time=False)

    assert [again.error for again in sent] == ["overloaded", ""]
    assert len(taken) == 2


def test_then_and_now_stand_beside_each_other() -> None:
    sent = [
        Again("01H", outcome(), outcome(worker="w2", cached_tokens=64, ttft_ms=10.0)),
        Again("02H", None, outcome()),
        Again("03H", outcome(status="error", error="engine_failed"), None, "overloaded"),
    ]
    console = Console(width=120, file=io.StringIO())

    console.print(resend.table(sent))

    assert isinstance(console.file, io.StringIO)
    rows = [line.split() for line in console.file.getvalue().splitlines()[1:]]
    assert rows[0] == ["01H", "w1", "w2", "32", "64", "20", "10", "ok", "ok"]
    assert rows[1][-3:] == ["aged", "out", "ok"]
    assert rows[2][-2:] == ["engine_failed", "overloaded"]
    assert resend.sums(sent) == (
        "3 sent again, 1 ended well both times: cached tokens 32 -> 64, mean TTFT 20.0 -> 10.0 ms"
    )


def test_sums_over_nothing_are_zero() -> None:
    assert resend.sums([Again("01H", None, None, "overloaded")]).endswith(
        "cached tokens 0 -> 0, mean TTFT 0.0 -> 0.0 ms"
    )
