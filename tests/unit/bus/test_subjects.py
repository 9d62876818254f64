"""Subjects are built and parsed in one place, and nothing slips through it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixbus.bus import subjects
from prefixbus.bus.errors import BadSubject

tokens = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)


# At most 4 bytes a character and 3 characters a byte: 32 characters always fit a token.
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=32))
@example("\U0010ffff" * 32)
def test_model_names_come_back_from_their_token(name: str) -> None:
    token = subjects.model_token(name)

    assert subjects.model_name(token) == name
    assert set(token) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


@pytest.mark.parametrize("token", ["", "a.b", "a_", "a_2", "a_2f", "_41", "_C3", "a b", "*", ">", "a" * 400])
def test_no_second_spelling_of_a_model_name(token: str) -> None:
    with pytest.raises(BadSubject):
        subjects.model_name(token)


@given(tokens, st.text("abc/.:_- ", min_size=1, max_size=30), st.one_of(st.just(""), tokens))
def test_an_infer_subject_comes_back(tenant: str, model: str, scope: str) -> None:
    assert subjects.parse_infer(subjects.infer(tenant, model, scope)) == (tenant, model, scope)


@pytest.mark.parametrize(
    "subject",
    [
        "pb.v1.infer",
        "pb.v1.infer.acme",
        "pb.v1.infer.acme.m.s.more",
        "pb.v2.infer.acme.m",
        "pb.v1.infer.ac me.m",
        "pb.v1.infer.acme.m.",
        "pb.v1.infer..m",
        "pb.v1.infer.acme.m.*",
    ],
)
def test_other_subjects_are_refused(subject: str) -> None:
    with pytest.raises(BadSubject):
        subjects.parse_infer(subject)


@given(tokens, tokens)
def test_a_cancel_subject_comes_back(tenant: str, request_id: str) -> None:
    assert subjects.parse_cancel(subjects.cancel(tenant, request_id)) == (tenant, request_id)
    assert subjects.parse_cancelled(subjects.cancelled(tenant, request_id)) == (tenant, request_id)


def test_a_tenants_cancel_is_not_taken_for_the_tokenizers_word() -> None:
    with pytest.raises(BadSubject):
        subjects.parse_cancelled(subjects.cancel("acme", "r1"))
    with pytest.raises(BadSubject):
        subjects.parse_cancel(subjects.cancelled("acme", "r1"))


@pytest.mark.parametrize("reply", ["_INBOX.acme.a", "_INBOX.acme.a.b", "_INBOX.acme.f00-BAR_x.7"])
def test_a_reply_in_the_own_inbox_is_taken(reply: str) -> None:
    assert subjects.is_own_reply(reply, "acme")


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "_INBOX.acme",
        "_INBOX.acme.",
        "_INBOX.acme..a",
        "_INBOX.acme.a.",
        "_INBOX.acme.*",
        "_INBOX.acme.>",
        "_INBOX.acme.a b",
        "_INBOX.acme.a\r\nPUB x 0",
        "_INBOX.acme2.a",
        "_INBOX.other.a",
        "_INBOX.ACME.a",
        "_SVC.router.a",
        "$JS.API.STREAM.DELETE.AUDIT",
        "pb.v1.work.w1",
    ],
)
def test_a_reply_anywhere_else_is_forged(reply: str) -> None:
    assert not subjects.is_own_reply(reply, "acme")
