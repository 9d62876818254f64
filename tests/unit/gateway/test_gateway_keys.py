"""API keys: what is one, and what it shows of itself."""

import pytest

from prefixbus.gateway.keys import ApiKey, InvalidKey, parse, text_of

TOKEN = "PMn0mJbWq1cO-f_3W9kZ6cVtN5r2e8xXyZaBcDeFgHI"


@pytest.mark.parametrize(
    ("authorization", "key"),
    [
        (f"Bearer acme.{TOKEN}", ApiKey("acme", "default", TOKEN)),
        (f"bearer   acme.{TOKEN} ", ApiKey("acme", "default", TOKEN)),
        (f"Bearer acme.ci-runner.{TOKEN}", ApiKey("acme", "ci-runner", TOKEN)),
    ],
)
def test_a_key_names_tenant_label_and_token(authorization: str, key: ApiKey) -> None:
    assert parse(authorization) == key


@pytest.mark.parametrize("label", ["default", "alice"])
def test_a_written_key_is_read_back(label: str) -> None:
    assert parse(f"Bearer {text_of('acme', TOKEN, label)}") == ApiKey("acme", label, TOKEN)


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Basic acme.{TOKEN}",
        f"Bearer {TOKEN}",
        f"Bearer .{TOKEN}",
        "Bearer acme.",
        f"Bearer ac>me.{TOKEN}",
        f"Bearer acme.*.{TOKEN}",
        f"Bearer a.b.c.{TOKEN}",
        "Bearer acme." + "x" * 257,
        "Bearer acme.\u0442\u043e\u043a\u0435\u043d",
        "Bearer acme.to\x00ken",
    ],
)
def test_what_cannot_be_a_key_is_refused_in_the_words_for_a_wrong_one(authorization: str) -> None:
    with pytest.raises(InvalidKey) as raised:
        parse(authorization)

    assert raised.value.sentence() == InvalidKey().sentence()


def test_a_key_does_not_show_its_token() -> None:
    assert TOKEN not in repr(ApiKey("acme", "default", TOKEN))


def test_digests_tell_keys_apart_and_depend_on_the_secret() -> None:
    one, two = ApiKey("a", "b", TOKEN), ApiKey("a", "c", TOKEN)

    assert one.digest(b"s") == ApiKey("a", "b", TOKEN).digest(b"s")
    assert one.digest(b"s") != two.digest(b"s")
    assert one.digest(b"s") != one.digest(b"t")
