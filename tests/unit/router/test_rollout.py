"""Who decides a request while a policy is being tried."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.errors import ConfigInvalid
from prefixbus.router.policy import Policy
from prefixbus.router.rollout import ROLES, Canary, Role, Rollout, Shadow, changed

OLD, NEW, CONFIGURED = Policy(version="old"), Policy(version="new", new_kv_price=0.1), Policy(name="round-robin")
FULL = Rollout(OLD, Canary(policy=NEW, share=0.25), Shadow(policy=NEW))


def share_of_canary(rollout: Rollout, prefix_class: str = "session") -> float:
    ids = [f"01JD{number:022d}" for number in range(4_000)]
    return sum(rollout.acting(one, prefix_class).role == "canary" for one in ids) / len(ids)


def test_without_a_canary_the_active_policy_decides() -> None:
    assert Rollout(OLD).acting("R1", "session") == (OLD, "active")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 1.0])
def test_a_canary_decides_its_share(share: float) -> None:
    found = share_of_canary(Rollout(OLD, Canary(policy=NEW, share=share)))

    assert found == pytest.approx(share, abs=0.03)
    assert (found == share) if share in (0.0, 1.0) else True


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_who_is_in_a_share_is_in_every_larger_one(request_id: str, one: float, two: float) -> None:
    """And twice asked, twice the same: attempts of a request are decided by one policy."""
    less, more = sorted((one, two))
    roles = [Rollout(OLD, Canary(policy=NEW, share=share)).acting(request_id, "") for share in (less, more, more)]

    assert roles[1] == roles[2]
    assert roles[0].role == "active" or roles[1].role == "canary"


def test_which_requests_a_canary_decides_is_the_same_on_every_machine() -> None:
    rollout = Rollout(OLD, Canary(policy=NEW, share=0.5))

    assert [rollout.acting(f"R{n}", "").role[0] for n in range(12)] == list("acccaccaccaa")


def test_a_canary_of_one_class_leaves_the_others_alone() -> None:
    rollout = Rollout(OLD, Canary(policy=NEW, share=1.0, prefix_class="rag"))

    assert share_of_canary(rollout, "rag") == 1.0
    assert share_of_canary(rollout, "session") == 0.0


def test_what_is_in_force_is_told_in_a_line() -> None:
    canary = Canary(policy=NEW, share=0.125, prefix_class="rag")

    assert str(Rollout(OLD)) == "prefix-aware/old"
    assert str(Rollout(OLD, canary, Shadow(policy=CONFIGURED))) == (
        "prefix-aware/old, canary prefix-aware/new for 12.5 % of rag requests, shadow round-robin/default"
    )


# --- changes


@pytest.mark.parametrize(
    ("role", "data", "after"),
    [
        ("active", msgspec.json.encode(NEW), msgspec.structs.replace(FULL, active=NEW)),
        ("active", None, msgspec.structs.replace(FULL, active=CONFIGURED)),
        ("canary", b'{"policy": {"version": "new", "new_kv_price": 0.1}, "share": 0.25}', FULL),
        ("canary", None, msgspec.structs.replace(FULL, canary=None)),
        ("shadow", b'{"policy": {"version": "new", "new_kv_price": 0.1}}', FULL),
        ("shadow", None, msgspec.structs.replace(FULL, shadow=None)),
    ],
)
def test_each_record_changes_its_own_part(role: Role, data: bytes | None, after: Rollout) -> None:
    assert changed(FULL, role, data, CONFIGURED) == after


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff", id="not utf-8"),
        pytest.param(b'{"policy": {"name": "coin-toss"}, "share": 1, "name": "coin-toss"}', id="unknown policy"),
        pytest.param(b'{"policy": {"weight": 1}, "share": 1}', id="unknown weight"),
        pytest.param(b'{"policy": {}, "share": 1.5}', id="a share over 1"),
        pytest.param(b'{"policy": {}, "share": -0.1}', id="a share below 0"),
        pytest.param(b'{"policy": {}, "share": 1, "prefix_class": "best"}', id="unknown class"),
        pytest.param(b'{"polic": {}}', id="misspelt"),
    ],
)
def test_an_invalid_record_is_refused_in_words(role: Role, data: bytes) -> None:
    with pytest.raises(ConfigInvalid, match=r"policy|canary|shadow"):
        changed(FULL, role, data, CONFIGURED)


HUGE = b"9" * 400
WILD = [
    b"[" * 100_000,
    b'{"version": "\\ud800"}',
    b'{"name": "no-such-policy"}',
    b'{"weights": {}}',
    b'{"new_kv_price": -0.1}',
    b'{"least_loaded": 0}',
    b'{"suspect_trust": 2}',
    *(
        b'{"%s": %s}' % (field, value)
        for field in (b"sibling_bonus_ms", b"margin_ms")
        for value in (b"-1", b"1e999", HUGE)
    ),
    *(
        b'{"%s": %s}' % (field, value)
        for field in (b"min_reuse_tokens", b"long_output_tokens")
        for value in (b"0", b"-1", b"1.5", b"18446744073709551616", HUGE)
    ),
]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("data", WILD, ids=lambda data: data[:40].decode())
def test_a_wild_weight_is_refused_and_what_was_in_force_stays(role: Role, data: bytes) -> None:
    """One of 400 digits was taken, and no record of a decision by it could be read again."""
    wrapped = {"active": data, "canary": b'{"share": 0.5, "policy": %s}' % data, "shadow": b'{"policy": %s}' % data}

    with pytest.raises(ConfigInvalid):
        changed(FULL, role, wrapped[role], CONFIGURED)


def test_a_canary_without_a_share_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="share"):
        changed(FULL, "canary", b'{"policy": {}}', CONFIGURED)
