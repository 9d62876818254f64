"""What a worker serves and a prompt's tokens are made for: the model's revisions, and the namespaces they make.

Tokenizer and bridge build the same identity from the same config, so equal digests mean that tokens, positions and
KV layout agree.

Owns: `serves`.   Must not know: tenants' permissions, where revisions come from.
Source: DESIGN section 3; the epoch is fixed until grants exist."""

import hashlib

import msgspec

from .config import ModelSection
from .errors import UnknownModel
from .namespace import EPOCH_ZERO, Namespace, canonical
from .revision import Revisions

_DIGEST_BYTES = 8


class ModelIdentity(msgspec.Struct, frozen=True):
    """The fields of a namespace that belong to the model and not to the caller. `adapters` are the names and revisions
    of those that are served with it, sorted."""

    model: str
    model_revision: str
    tokenizer_revision: str
    template_version: str
    position_digest: str
    kv_dtype: str
    block_size: int
    media_revision: str = ""
    adapters: tuple[tuple[str, str], ...] = ()

    def digest(self) -> str:
        """16 hex digits that name this identity in `Route.serves` and `Load.serves`."""
        # Namespaces of nobody: their encoding keeps every field apart, and one's end from the next one's beginning.
        spaces = [self.namespace("", "", adapter=name) for name in ("", *dict(self.adapters))]
        return hashlib.blake2b(b"".join(map(canonical, spaces)), digest_size=_DIGEST_BYTES).hexdigest()

    def namespace(
        self, tenant: str, scope: str, client_salt: str = "", *, adapter: str = "", acl_epoch: bytes = EPOCH_ZERO
    ) -> Namespace:
        """Everything that must agree for a request of this caller to share KV.

        :raises UnknownModel: there is no such adapter."""
        adapter_revision = dict(self.adapters).get(adapter) if adapter else ""
        if adapter_revision is None:
            raise UnknownModel(f"{self.model} has no adapter {adapter[:80]!r}.", field="model")
        return Namespace(
            tenant=tenant,
            scope=scope,
            model=self.model,
            model_revision=self.model_revision,
            tokenizer_revision=self.tokenizer_revision,
            template_version=self.template_version,
            adapter=adapter,
            adapter_revision=adapter_revision,
            media_revision=self.media_revision,
            position_digest=self.position_digest,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            acl_epoch=acl_epoch,
            client_salt=client_salt,
        )


def of_model(name: str, section: ModelSection, revisions: Revisions | None = None) -> ModelIdentity:
    """The identity of a configured model. Where the config leaves a revision open, that of its files (`revisions`, see
    `revision.of_directory`) stands for it: all services must then see the same files."""
    return ModelIdentity(
        model=name,
        model_revision=section.model_revision,
        tokenizer_revision=section.tokenizer_revision or (revisions.tokenizer if revisions else ""),
        template_version=section.template_version or (revisions.template if revisions else ""),
        position_digest=section.position_digest,
        kv_dtype=section.kv_dtype,
        block_size=section.block_size,
        media_revision=section.media_revision,
        adapters=tuple(sorted((name, adapter.revision) for name, adapter in section.adapters.items())),
    )
