"""Nothing runs here but what this worker serves, in the namespace it says, for an inbox that is the tenant's."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixbus.bus.identity import ModelIdentity
from prefixbus.bus.messages import VERSION, Dispatch, Job
from prefixbus.bus.namespace import Namespace, ns_id
from prefixbus.worker_bridge import vetting

KEY = b"k" * 32
IDENTITY = ModelIdentity(
    model="m",
    model_revision="sha256:m",
    tokenizer_revision="sha256:t",
    template_version="v1",
    position_digest="",
    kv_dtype="bfloat16",
    block_size=32,
    adapters=(("french", "sha256:f"),),
)
NAMESPACE = IDENTITY.namespace("acme", "team-legal")


def job(namespace: Namespace = NAMESPACE, **changes: Any) -> Job:
    made = Job(
        v=VERSION,
        request_id="R1",
        client_request_id="c1",
        reply="_INBOX.acme.c1.x",
        namespace=namespace,
        tokens=bytes(4 * 40),
        kind="chat",
        params=b'{"max_tokens": 3}',
        include_usage=False,
        created_at=1,
        deadline_at=2.0,
    )
    return msgspec.structs.replace(made, **changes)


def dispatch(wanted: Job, **changes: Any) -> Dispatch:
    made = Dispatch(
        v=VERSION,
        request_id="R1",
        attempt=1,
        incarnation=1,
        max_queue_ms=0,
        accept_by_at=0,
        prefill_ms=0,
        predicted_tokens=0,
        decision="",
        ns_id=ns_id(KEY, wanted.namespace),
        job=b"",
    )
    return msgspec.structs.replace(made, **changes)


def vet(wanted: Job, asked: Dispatch | None = None) -> vetting.Refusal | vetting.Params:
    return vetting.vet(asked or dispatch(wanted), wanted, identity=IDENTITY, namespace_key=KEY, max_model_len=100)


def test_what_is_served_may_run() -> None:
    assert vet(job()) == {"max_tokens": 3}
    assert vet(job(IDENTITY.namespace("acme", "", "the client's own salt"))) == {"max_tokens": 3}
    assert vet(job(params=b"")) == {}
    assert vet(job(IDENTITY.namespace("acme", "", adapter="french"))) == {"max_tokens": 3}


@pytest.mark.parametrize(
    "changes",
    [{"adapter": "german"}, {"adapter_revision": "sha256:older"}, {"adapter": ""}],
    ids=["another adapter", "another revision", "a revision alone"],
)
def test_an_adapter_is_served_in_its_own_revision_alone(changes: dict[str, str]) -> None:
    wanted = job(msgspec.structs.replace(IDENTITY.namespace("acme", "", adapter="french"), **changes))

    refused = vet(wanted)

    assert isinstance(refused, vetting.Refusal)
    assert (refused.code, refused.fact) == ("stale_namespace", "refused_namespace")


@pytest.mark.parametrize(
    "field",
    [field for field in Namespace.__struct_fields__ if field not in ("tenant", "scope", "client_salt")],
)
def test_a_namespace_that_differs_in_any_field_is_refused(field: str) -> None:
    """Even with an id that is right for it: this worker does not serve it."""
    before = getattr(NAMESPACE, field)
    other = before + 1 if isinstance(before, int) else before + (b"x" if isinstance(before, bytes) else "x")

    refusal = vet(job(msgspec.structs.replace(NAMESPACE, **{field: other})))

    assert isinstance(refusal, vetting.Refusal)
    assert (refusal.code, refusal.fact) == (vetting.STALE_NAMESPACE, vetting.FACT_NAMESPACE)
    assert field in refusal.detail


def test_the_sentence_never_shows_an_epoch() -> None:
    refusal = vet(job(msgspec.structs.replace(NAMESPACE, acl_epoch=b"SECRET-EPOCH-XYZ")))

    assert isinstance(refusal, vetting.Refusal) and "SECRET" not in refusal.detail


def test_an_id_of_another_namespace_is_refused() -> None:
    """The salt is made from the id: with another tenant's id, this tenant would read that tenant's cache."""
    wanted = job()
    stolen = ns_id(KEY, IDENTITY.namespace("victim", ""))

    refusal = vet(wanted, dispatch(wanted, ns_id=stolen))

    assert isinstance(refusal, vetting.Refusal)
    assert (refusal.code, refusal.fact) == (vetting.STALE_NAMESPACE, vetting.FACT_NAMESPACE)


@pytest.mark.parametrize(
    "reply", ["", "_INBOX.other.x", "_SVC.router.r1.x", "$JS.API.STREAM.DELETE.AUDIT", "_INBOX.acme.>", "_INBOX.acme"]
)
def test_an_answer_goes_to_the_tenants_own_inbox_only(reply: str) -> None:
    refusal = vet(job(reply=reply))

    assert isinstance(refusal, vetting.Refusal)
    assert (refusal.code, refusal.fact) == (vetting.FORGED_REPLY, vetting.FACT_REPLY)


def test_an_order_has_no_inbox_and_nothing_but_an_order_has_none() -> None:
    order, with_a_client = job(reply=""), job()

    assert vet(order, dispatch(order, decision="warm")) == {"max_tokens": 3}
    refusal = vet(with_a_client, dispatch(with_a_client, decision="warm"))
    assert isinstance(refusal, vetting.Refusal) and refusal.code == vetting.BAD_REQUEST


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tokens": b""}, vetting.BAD_REQUEST),
        ({"tokens": bytes(7)}, vetting.BAD_REQUEST),
        ({"kind": "images"}, vetting.BAD_REQUEST),
        ({"params": b"[1]"}, vetting.BAD_REQUEST),
        ({"params": b"{"}, vetting.BAD_REQUEST),
        ({"request_id": "R2"}, vetting.BAD_REQUEST),
        ({"tokens": bytes(400)}, vetting.CONTEXT_TOO_LONG),
    ],
)
def test_a_job_that_cannot_be_run_is_refused(changes: dict[str, Any], code: str) -> None:
    refusal = vet(job(**changes))

    assert isinstance(refusal, vetting.Refusal)
    assert (refusal.code, refusal.fact) == (code, "")


@given(st.binary(max_size=60))
def test_no_parameters_break_the_check(params: bytes) -> None:
    refusal = vet(job(params=params))

    assert isinstance(refusal, dict) or refusal.code == vetting.BAD_REQUEST


def test_what_is_the_bridges_to_say_is_not_taken_from_a_request() -> None:
    params = vetting.sampling_params(
        b'{"temperature": 0.5, "cache_salt": "mine", "prompt": [1], "stream": false, "kv_transfer_params": {}}'
    )

    assert params == {"temperature": 0.5}


def test_a_chat_is_given_to_the_engine_with_what_its_endpoint_reads_alone() -> None:
    chat = (
        b'{"messages":[{"role":"user","content":"hi"}],"tools":[],"tool_choice":"auto","kv_transfer_params":{},'
        b'"cache_salt":"x","chat_template":"y","model":"z","max_tokens":9,"request_id":"r","priority":-1}'
    )

    assert vet(job(chat=chat)) == {
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [],
        "tool_choice": "auto",
    }


@pytest.mark.parametrize("chat", [b"{", b"[]", b"{}", b'{"messages":"hi"}', b'{"tools":[]}'])
def test_a_chat_without_messages_is_refused(chat: bytes) -> None:
    refused = vet(job(chat=chat))

    assert isinstance(refused, vetting.Refusal) and refused.code == vetting.BAD_REQUEST


def test_messages_among_the_parameters_are_no_chat() -> None:
    assert vet(job(params=b'{"messages":[],"max_tokens":1}')) == {"max_tokens": 1}
