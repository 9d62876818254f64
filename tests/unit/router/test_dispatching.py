"""What the requests of a router share: who is told of a lost worker, and what prices a model."""

from pathlib import Path
from typing import Any

import pytest

from prefixbus.bus.clock import VirtualClock
from prefixbus.bus.config import Config, ModelSection
from prefixbus.bus.errors import ConfigInvalid
from prefixbus.bus.messages import Route
from prefixbus.bus.runtime import Runtime
from prefixbus.router.cost import PROFILES
from prefixbus.router.dispatching import Desk, Request
from prefixbus.router.fleet import Lost


class Unused:
    """Requests in these tests are never run."""

    inbox_prefix = "_SVC.router.router-1"


def desk(tmp_path: Path, **profiles: str) -> Desk:
    models = {
        name: ModelSection(tokenizer="t", model_revision="sha256:w", profile=profile)
        for name, profile in profiles.items()
    }
    rt = Runtime("router", "router-1", tmp_path, Config(models=models), VirtualClock())
    rt.bus = Unused()  # type: ignore[assignment]  # nothing of it is used
    rt.task_group = Unused()  # type: ignore[assignment]  # nor of this
    return Desk(rt, journal_key=b"k" * 32)


def in_hand(of: Desk, request_id: str, worker: str) -> Request:
    """A request that was dispatched to this worker."""
    fields: dict[str, Any] = {
        "v": 1,
        "request_id": request_id,
        "client_request_id": request_id,
        "tenant": "acme",
        "model": "m",
        "serves": "digest",
        "ns_id": bytes(16),
        "keys": b"",
        "prompt_tokens": 1,
        "output_tokens": 1,
        "prefix_class": "session",
        "reply": "_INBOX.acme.1",
        "deadline_at": 60.0,
        "job": b"",
    }
    request = of.in_hand[request_id] = Request(of, Route(**fields))
    request.attempts.decided(worker, 1)
    return request


def test_a_lost_worker_wakes_the_requests_it_had_and_no_others(tmp_path: Path) -> None:
    """With 20,000 in hand, waking all of them holds the loop for as long as a lease."""
    shared = desk(tmp_path)
    its_own, others = in_hand(shared, "r1", "w1"), in_hand(shared, "r2", "w2")

    shared.lost(Lost("w1", 1))

    assert (len(its_own._mailbox), len(others._mailbox)) == (1, 0)


def test_a_model_is_priced_by_the_profile_its_section_names(tmp_path: Path) -> None:
    shared = desk(tmp_path, big="h100-70b", small="instant")

    assert shared.choices.models == {"big": PROFILES["h100-70b"], "small": PROFILES["instant"]}


def test_an_unknown_profile_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"models\.big\.profile: 'h200' .* h100-8b") as caught:
        desk(tmp_path, small="instant", big="h200")

    assert caught.value.field == "models.big.profile"
