"""Where a router expects to hear of an attempt, and how it knows that who speaks there was told to.

Bridges may write into all of a router's inbox, and one that had an attempt of a request knows its id. So an attempt's
address ends in a mark, a keyed digest of both, that is told to its own bridge alone:

    <inbox>.<kind>.<request id>.<attempt>-<mark>

What a stream keeps but once goes by that mark, too: whoever knows a message id can use it first.

Owns: the form, and the key.   Must not know: NATS, what is said."""

import hashlib

_MARK_BYTES = 8
_DIGITS_MAX = 4


class Addresses:
    """Those below one inbox. `key` is this process's own, and random."""

    def __init__(self, inbox: str, key: bytes) -> None:
        self._inbox = inbox
        self._key = key

    def __repr__(self) -> str:
        return f"<Addresses below {self._inbox}>"

    def of(self, kind: str, request_id: str, attempt: int) -> str:
        return f"{self._inbox}.{kind}.{request_id}.{self.name(request_id, attempt)}"

    def all(self, kind: str) -> str:
        """The subject that has them all."""
        return f"{self._inbox}.{kind}.*.*"

    def name(self, request_id: str, attempt: int) -> str:
        """One token for this attempt of this request, which nobody knows who was not told."""
        asked = f"{request_id}.{attempt}".encode()
        return f"{attempt}-{hashlib.blake2b(asked, digest_size=_MARK_BYTES, key=self._key).hexdigest()}"

    def read(self, subject: str) -> tuple[str, int] | None:
        """Request id and attempt of an address; None if nobody was ever told it."""
        request_id, name = subject.split(".")[-2:]
        digits = name.partition("-")[0]
        # Longer ones are no number of ours, and converting them takes time.
        attempt = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS_MAX else 0
        return (request_id, attempt) if name == self.name(request_id, attempt) else None
