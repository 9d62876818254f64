"""What a record in the bucket POLICIES means to whoever asks which policy is in force."""

import pytest

from prefixbus.cluster import control


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


def test_without_a_record_the_configured_one_is_told_as_such() -> None:
    assert control.PolicyInForce("prefix-aware", "default", 0).sentence() == "prefix-aware (the config's; none was set)"
