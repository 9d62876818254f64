"""What a record in the bucket POLICIES means to whoever asks which policy is in force."""

import math
from pathlib import Path

import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from prefixbus.bus import messages
from prefixbus.bus.errors import ConfigInvalid
from prefixbus.cluster import control
from prefixbus.router.policy import Policy
from prefixbus.router.rollout import Canary, Role, Rollout, Shadow, changed


@pytest.mark.parametrize(
    ("story", "data", "revision", "sentence"),
    [
        ("set by name", b'{"name": "round-robin"}', 3, "round-robin (revision 3)"),
        ("with a version", b'{"name": "prefix-aware", "version": "b"}', 4, "prefix-aware, version b (revision 4)"),
    ],
)
def test_a_policy_is_told_with_its_revision(story: str, data: bytes, revision: int, sentence: str) -> None:
    assert control.read_policy(data, revision).sentence() == sentence


@pytest.mark.parametrize("data", [b"", b"{", b'{"name": "best"}', b'{"weight": 1}'])
def test_a_record_that_routers_refuse_is_not_told_as_the_policy(data: bytes) -> None:
    sentence = control.read_policy(data, 5).sentence()

    assert sentence.startswith("revision 5 is refused by the routers")


@pytest.mark.parametrize(
    ("role", "data", "sentence"),
    [
        (
            "canary",
            b'{"policy": {"version": "b"}, "share": 0.1}',
            "prefix-aware/b for 10 % of all requests (revision 6)",
        ),
        (
            "canary",
            b'{"policy": {"version": "b"}, "share": 1, "prefix_class": "rag"}',
            "prefix-aware/b for 100 % of rag requests (revision 6)",
        ),
        ("shadow", b'{"policy": {"name": "round-robin"}}', "round-robin/default (revision 6)"),
    ],
)
def test_what_is_tried_beside_the_policy_is_told(role: Role, data: bytes, sentence: str) -> None:
    assert control.read_beside(role, data, 6) == sentence


@pytest.mark.parametrize("role", ["canary", "shadow"])
def test_a_canary_or_shadow_that_routers_refuse_is_not_told_as_one(role: Role) -> None:
    assert control.read_beside(role, b'{"policy": {"name": "best"}}', 6).startswith("revision 6 is refused")


def test_a_policy_is_put_by_name_or_from_a_file_of_weights(tmp_path: Path) -> None:
    weights = tmp_path / "cautious.json"
    weights.write_text('{"version": "cautious", "new_kv_price": 0.5}')
    before = Rollout(Policy())

    by_name = control.policy_record("round-robin", "canary", share=0.2, prefix_class="rag")
    from_file = control.policy_record(str(weights), "shadow")

    assert changed(before, "canary", by_name, Policy()).canary == Canary(
        policy=Policy(name="round-robin"), share=0.2, prefix_class="rag"
    )
    assert changed(before, "shadow", from_file, Policy()).shadow == Shadow(
        policy=Policy(version="cautious", new_kv_price=0.5)
    )


@pytest.mark.parametrize("text", [None, "{", '{"weight": 1}', '{"new_kv_price": -1}'])
def test_a_file_that_is_no_policy_is_not_put(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "p.json"
    if text is not None:
        file.write_text(text)

    with pytest.raises(ConfigInvalid):
        control.policy_record(str(file), "active")


def test_without_a_record_the_configured_one_is_told_as_such() -> None:
    assert control.PolicyInForce("prefix-aware", "default", 0).sentence() == "prefix-aware (the config's; none was set)"


def test_a_cleared_policy_is_told_as_the_configured_one_and_by_which_revision() -> None:
    cleared = control.PolicyInForce("prefix-aware", "default", 4, cleared=True)

    assert cleared.sentence() == "prefix-aware (the config's, since revision 4 cleared any other)"


@pytest.mark.parametrize(
    ("subject", "changed", "believed"),
    [("pb.v1.load.w1", {}, True), ("pb.v1.load.w2", {}, False), ("pb.v1.load.w1", {"kv_usage": math.nan}, False)],
)
def test_a_heartbeat_is_shown_if_routers_would_believe_it(
    subject: str, changed: dict[str, float], believed: bool
) -> None:
    load = messages.Load(1, "w1", 1, 1, 0, "m", "", 12.0, 3, 1, 256, 0.25, 1000, 32, False, [])
    data = messages.LOAD.encode(msgspec.structs.replace(load, **changed))

    assert (control.load_in(Msg(Client(), subject, data=data)) is not None) is believed


def test_a_heartbeat_that_cannot_be_read_is_not_shown() -> None:
    assert control.load_in(Msg(Client(), "pb.v1.load.w1", data=b"rubbish")) is None
