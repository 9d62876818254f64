"""Labels of metrics have few values, whatever the world says."""

import re

import pytest
from prometheus_client import CollectorRegistry, Counter

from prefixbus.bus import labels
from prefixbus.router import policy
from prefixbus.tokenizer import intake


def test_every_decision_has_a_label_of_its_own() -> None:
    """The names are those that the policy's docstring explains."""
    explained = re.findall(r"^    ([a-z-]+)   ", policy.__doc__ or "", re.MULTILINE)

    assert sorted(labels.DECISIONS) == sorted(explained)
    assert [labels.decision(name) for name in explained] == explained


@pytest.mark.parametrize(
    ("value", "label"),
    [("", "none"), ("rubbish", "other"), ("blind", "blind")],
    ids=["before any", "of another version", "known"],
)
def test_what_is_no_decision_of_ours_is_other(value: str, label: str) -> None:
    assert labels.decision(value) == label


def test_what_is_no_prefix_class_is_other() -> None:
    assert [labels.prefix_class(value) for value in ("rag", "", "mine")] == ["rag", "other", "other"]


@pytest.mark.parametrize(
    ("version", "label"),
    [("sha256:" + "0123456789abcdef" * 4, "0123456789ab"), ("v2", "v2"), ("x" * 100, "x" * 12), ("", "none")],
    ids=["digest", "name", "long name", "unknown"],
)
def test_a_template_is_named_in_short(version: str, label: str) -> None:
    assert labels.template(version) == label


def test_values_beyond_few_are_other_and_those_seen_stay() -> None:
    few = labels.Few(2)

    assert [few.of(value) for value in ("a", "b", "c", "a", "")] == ["a", "b", "other", "a", "none"]


def test_prefix_classes_are_those_that_a_client_may_name() -> None:
    assert labels.PREFIX_CLASSES == intake.PREFIX_CLASSES


def test_a_remembered_series_is_the_metrics_own() -> None:
    registry = CollectorRegistry()
    of = labels.series(Counter("seen", "Of a test.", ["kind", "code"], registry=registry))

    of("a", "ok").inc()
    of("a", "ok").inc()
    of("a", "lost").inc()

    assert registry.get_sample_value("seen_total", {"kind": "a", "code": "ok"}) == 2
    assert registry.get_sample_value("seen_total", {"kind": "a", "code": "lost"}) == 1
