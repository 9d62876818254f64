"""Equal digests mean equal models, and a namespace holds all of them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prefixbus.bus import identity, revision
from prefixbus.bus.config import ModelSection
from prefixbus.bus.errors import ConfigInvalid, UnknownModel
from prefixbus.bus.identity import ModelIdentity
from prefixbus.bus.namespace import EPOCH_ZERO

adapters = st.dictionaries(st.text(min_size=1), st.text(min_size=1), max_size=3)
identities = st.builds(ModelIdentity, adapters=adapters.map(lambda found: tuple(sorted(found.items()))))
SECTION = ModelSection(tokenizer="t", model_revision="sha256:m")


@given(identities, identities)
def test_no_two_identities_share_a_digest(one: ModelIdentity, other: ModelIdentity) -> None:
    assume(one != other)

    assert one.digest() != other.digest()


@pytest.mark.parametrize("field", ModelIdentity.__struct_fields__)
def test_every_field_changes_the_digest(field: str) -> None:
    base = identity.of_model("m", SECTION)
    changed: Any = getattr(base, field)
    more: Any = (("x", "sha256:x"),) if isinstance(changed, tuple) else 1 if isinstance(changed, int) else "x"

    other = msgspec.structs.replace(base, **{field: changed + more})

    assert other.digest() != base.digest()
    assert len(base.digest()) == 16


@given(identities, st.text(), st.text(), st.text())
def test_a_namespace_holds_the_whole_identity_and_the_caller(
    one: ModelIdentity, tenant: str, scope: str, salt: str
) -> None:
    space = one.namespace(tenant, scope, salt)

    of_the_model = {field: value for field, value in msgspec.structs.asdict(one).items() if field != "adapters"}
    assert {field: getattr(space, field) for field in of_the_model} == of_the_model
    assert (space.adapter, space.adapter_revision) == ("", "")
    assert (space.tenant, space.scope, space.client_salt, space.acl_epoch) == (tenant, scope, salt, EPOCH_ZERO)


@given(identities, st.data())
def test_an_adapters_namespace_differs_from_all_others_in_it_and_its_revision_alone(
    one: ModelIdentity, data: st.DataObject
) -> None:
    assume(one.adapters)
    name, its_revision = data.draw(st.sampled_from(one.adapters))

    space = one.namespace("t", "", adapter=name)

    assert space == msgspec.structs.replace(one.namespace("t", ""), adapter=name, adapter_revision=its_revision)


def test_an_adapter_that_is_not_served_has_no_namespace() -> None:
    with pytest.raises(UnknownModel, match="'french'"):
        identity.of_model("m", SECTION).namespace("t", "", adapter="french")


def test_revisions_that_the_config_names_win_over_those_of_the_files() -> None:
    named = msgspec.structs.replace(SECTION, tokenizer_revision="named")
    found = revision.Revisions(tokenizer="found", template="found")

    made = identity.of_model("m", named, found)

    assert (made.tokenizer_revision, made.template_version) == ("named", "found")


def tokenizer_directory(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_template_or_a_token_it_prints_changes_the_template_alone(tmp_path: Path) -> None:
    base = revision.of_directory(tokenizer_directory(tmp_path / "a", chat_template="x", eos_token="e", other=1))
    same = revision.of_directory(tokenizer_directory(tmp_path / "b", chat_template="x", eos_token={"content": "e"}))
    template = revision.of_directory(tokenizer_directory(tmp_path / "c", chat_template="y", eos_token="e"))
    token = revision.of_directory(tokenizer_directory(tmp_path / "d", chat_template="x", eos_token="f"))

    assert same == base
    assert len({base.template, template.template, token.template}) == 3
    assert {base.tokenizer, template.tokenizer, token.tokenizer} == {base.tokenizer}


def test_a_template_in_a_file_of_its_own_counts(tmp_path: Path) -> None:
    directory = tokenizer_directory(tmp_path / "a")
    before = revision.of_directory(directory)

    (directory / "chat_template.jinja").write_text("x")

    assert revision.of_directory(directory).template != before.template


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        revision.of_directory(tmp_path)


def test_a_vocabulary_without_a_tokenizer_json_is_covered_with_all_that_reads_it(tmp_path: Path) -> None:
    def made(name: str, merges: str = "a b", **config: Any) -> revision.Revisions:
        directory = tokenizer_directory(tmp_path / name, **{"chat_template": "x", "tokenizer_class": "A", **config})
        (directory / "tokenizer.json").unlink()
        (directory / "vocab.json").write_text("{}")
        (directory / "merges.txt").write_text(merges)
        return revision.of_directory(directory)

    base = made("base")

    assert made("same") == base
    assert made("template", chat_template="y").tokenizer == base.tokenizer
    assert len({base.tokenizer, made("merges", "b a").tokenizer, made("class", tokenizer_class="B").tokenizer}) == 3


def test_half_a_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")

    with pytest.raises(ConfigInvalid, match=r"cannot be read.*merges.txt"):
        revision.of_directory(tmp_path)
