"""What the engine is asked for and salted with for a namespace, and whose blocks its events tell of.

An engine's events name an adapter by what it was called when it was loaded, and say nothing of its revision. So the
salt says it: it is made for one namespace, which has the revision, and its MAC covers the adapter; a block that
carries a salt of ours under another adapter's name is nobody's.

Owns: adapter <-> the engine's name for it, salts.   Must not know: events, requests, the engine.
Source: DESIGN 3; facts/vllm.md (LoRA's extra key is ("lora", name, path), events show only the name)."""

from collections.abc import Mapping

from ..bus import namespace
from ..bus.namespace import Namespace


class Adapters:
    """`engine_names` maps the adapters that are served to what the engine calls them."""

    def __init__(self, salt_key: bytes, engine_names: Mapping[str, str]) -> None:
        self._salt_key = salt_key
        self._engine_names = dict(engine_names)
        self._adapters = {name: adapter for adapter, name in engine_names.items()}

    def __repr__(self) -> str:
        return f"<Adapters {self._engine_names}>"

    @property
    def engine_names(self) -> list[str]:
        return sorted(self._adapters)

    def model(self, space: Namespace) -> str:
        """What to ask the engine for; empty for the model itself. The namespace is one that is served here."""
        return self._engine_names[space.adapter] if space.adapter else ""

    def salt(self, space: Namespace, ns_id: bytes) -> str:
        return namespace.salt(self._salt_key, ns_id, space.adapter)

    def owner(self, salt: str, engine_name: str | None) -> bytes | None:
        """The ns_id of a salt of ours on a block of this adapter (None: of none); None if it is not ours."""
        if engine_name is None:
            return namespace.parse_salt(self._salt_key, salt)
        adapter = self._adapters.get(engine_name)
        return None if adapter is None else namespace.parse_salt(self._salt_key, salt, adapter)
