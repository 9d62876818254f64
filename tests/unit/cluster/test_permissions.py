"""The table says what the documents say, and no row contains a right that no service should have."""

from pathlib import Path

import pytest

from prefixbus.cluster import permissions

DOCUMENT = Path(__file__).resolve().parents[3] / "infra" / "nats" / "permissions.md"
ROLES = [*permissions.service_roles(), permissions.worker_bridge("w1")]


def test_the_document_is_made_from_the_table() -> None:
    assert DOCUMENT.read_text("utf-8") == permissions.document(), (
        "run `python -m prefixbus.cluster.permissions > infra/nats/permissions.md`"
    )


@pytest.mark.parametrize("access", ROLES, ids=lambda access: access.role)
def test_no_role_may_delete_or_purge_a_stream_or_call_the_whole_api(access: permissions.Access) -> None:
    for subject in access.all_publish():
        assert not subject.startswith(("$JS.API.STREAM.DELETE", "$JS.API.STREAM.PURGE", "$JS.API.STREAM.MSG.DELETE"))
        assert subject not in (">", "$JS.>", "$JS.API.>", "_SVC.>", "pb.>", "pb.v1.>", "$KV.>", "$SYS.>")


@pytest.mark.parametrize("access", ROLES, ids=lambda access: access.role)
def test_no_role_hears_everything_or_another_services_inbox(access: permissions.Access) -> None:
    own = "_SVC.worker_bridge.w1.>" if access.role == "worker_bridge" else f"_SVC.{access.role}.>"
    patterns = [entry.partition(" ")[0] for entry in access.subscribe]

    assert [pattern for pattern in patterns if pattern.startswith("_SVC")] == [own]
    assert not {">", "pb.>", "pb.v1.>", "_INBOX.>", "$JS.>", "$SYS.>"} & set(patterns)


def test_only_the_callout_may_answer_to_any_reply_subject() -> None:
    assert [access.role for access in ROLES if access.answers_server] == ["callout"]
    assert [access.role for access in ROLES if access.account == permissions.AUTH] == ["callout"]


@pytest.mark.parametrize("access", ROLES, ids=lambda access: access.role)
def test_nothing_is_listed_twice(access: permissions.Access) -> None:
    assert len(access.all_publish()) == len(set(access.all_publish()))
    assert len(access.subscribe) == len(set(access.subscribe))


def test_two_bridges_share_no_subject_that_names_a_worker() -> None:
    first, second = permissions.worker_bridge("w1"), permissions.worker_bridge("w2")

    shared = set(first.all_publish()) & set(second.all_publish())

    assert not [subject for subject in shared if "w1" in subject.split(".") or "w2" in subject.split(".")]
    assert not any("w1" in subject.split(".") for subject in second.all_publish() + second.subscribe)
