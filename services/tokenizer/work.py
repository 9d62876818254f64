# ruff: noqa: TID251, RUF100 - decides what runs in which thread
"""A request's prompt as token ids, without ever holding up the event loop.

Small work runs where it is, since a thread costs more; the rest runs in threads, where the batch call leaves the GIL
alone. What is small is known before anything is parsed: from the body's bytes, and from its quotes, of which every
message, tool call and key needs some. Long bodies and prompts have a lane of their own, one thread fewer than cores:
they wait for each other, nothing waits for them.

    parse, render, split, hash    in place while `is_small(body)`
    encode what the memo lacks    in place up to ENCODE_INLINE_CHARS
    ask and fill the memo         on the loop (it is the loop's), SLICE texts at a turn

Owns: lanes, thresholds, the memo's use.   Must not know: NATS, headers.
Units: characters, bytes, seconds.   Source: facts/index.md (`encode` in a thread holds the GIL; 2-3 us/token);
tests/bench."""

import os
from collections.abc import Callable
from typing import TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from anyio import CapacityLimiter

from ..bus.clock import Clock
from ..bus.errors import BadRequest
from . import intake, memo, render
from .intake import Request
from .model import TokenizerModel, pack
from .sentinels import Sentinels

# At worst 2 ms in place: 60 ns a byte of tool calls, 25 us a message (8 quotes). Text alone is 10 ns a byte.
SMALL_BYTES = 32 * 1024
SMALL_QUOTES = 512
# 1 ms in English, 3 ms in Chinese; a hop to a thread and back is 0.1 ms.
ENCODE_INLINE_CHARS = 2048
# Of a body (bytes) or of what is to be encoded (characters): from here on in the long lane.
LONG = 64 * 1024
# Texts looked up or remembered in one turn of the loop: 0.3 ms.
SLICE = 256

T = TypeVar("T")


class Tokens(msgspec.Struct, frozen=True):
    """Ids u32 LE; how many of them came out of the memo; whether the client's texts held special tokens."""

    ids: bytes
    memo_tokens: int
    covered: bool


class Draft(msgspec.Struct):
    """A prompt on its way to ids: ids (u32 LE) and texts, in order; `keys` has a memo key for each text, or None where
    it stands alone. `missing` are the places of texts that the memo does not know."""

    parts: list[bytes | str]
    keys: list[bytes | None]
    covered: bool
    missing: list[int] = []
    missing_chars: int = 0
    memo_tokens: int = 0


def is_small(body: bytes) -> bool:
    """Whether to parse, render, split and hash this body in place; costs a scan of at most SMALL_BYTES."""
    return len(body) <= SMALL_BYTES and body.count(b'"') <= SMALL_QUOTES


class Workshop:
    """Turns requests into ids; one for all models of a process."""

    def __init__(self, store: memo.Memo, secret: bytes, clock: Clock) -> None:
        self._memo = store
        self._secret = secret
        self._clock = clock
        # A prompt is encoded in the thread that asked for it: the thread pool inside `tokenizers` would put small
        # prompts behind a long one. The library reads this at its first batch.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._long = CapacityLimiter(max(1, (os.cpu_count() or 2) - 1))
        self._short = CapacityLimiter(4)

    async def run(self, size: int, work: Callable[..., T], *args: object) -> T:
        """`work(*args)` in a thread of the lane for its size (bytes or characters)."""
        return await anyio.to_thread.run_sync(work, *args, limiter=self._long if size >= LONG else self._short)

    def begin(self, model: TokenizerModel, tenant: str, scope: str, request: Request, max_model_len: int) -> Draft:
        """A small request's draft, with what the memo knows filled in.

        :raises BadRequest: the prompt cannot be rendered, holds foreign ids, or is hopelessly too long."""
        draft = draw(model, request, self._key(model, scope), max_model_len)
        self._recall(draft, tenant, range(len(draft.parts)))
        return draft

    def finish_at_once(self, model: TokenizerModel, tenant: str, draft: Draft) -> Tokens:
        """The ids of a draft that lacks at most ENCODE_INLINE_CHARS."""
        if draft.missing:
            fresh = _encode(model, draft)
            self._remember(draft, tenant, fresh, range(len(fresh)))
        return _joined(draft)

    async def tokens(
        self,
        model: TokenizerModel,
        tenant: str,
        scope: str,
        request: Request,
        max_model_len: int,
        body_bytes: int,
        draft: Draft | None = None,
    ) -> Tokens:
        """The ids of any request, from the draft that `begin` made of it or from the start.

        :raises BadRequest: see `begin`."""
        if draft is None:
            draft = await self.run(body_bytes, draw, model, request, self._key(model, scope), max_model_len)
            for places in _slices(len(draft.parts)):
                self._recall(draft, tenant, places)
                await anyio.lowlevel.checkpoint()
        if draft.missing_chars <= ENCODE_INLINE_CHARS:
            return self.finish_at_once(model, tenant, draft)
        fresh = await self.run(draft.missing_chars, _encode, model, draft)
        for places in _slices(len(fresh)):
            self._remember(draft, tenant, fresh, places)
            await anyio.lowlevel.checkpoint()
        return _joined(draft)

    def _key(self, model: TokenizerModel, scope: str) -> bytes:
        return memo.scope_key(self._secret, model.revisions.tokenizer, scope)

    def _recall(self, draft: Draft, tenant: str, places: range) -> None:
        now = self._clock.now()
        parts, keys = draft.parts, draft.keys
        for i in places:
            part = parts[i]
            if isinstance(part, bytes):
                continue
            key = keys[i]
            ids = self._memo.get(tenant, key, now) if key is not None else None
            if ids is None:
                draft.missing.append(i)
                draft.missing_chars += len(part)
            else:
                draft.memo_tokens += len(ids) // 4
                parts[i] = ids

    def _remember(self, draft: Draft, tenant: str, fresh: list[bytes], places: range) -> None:
        now = self._clock.now()
        for place in places:
            i = draft.missing[place]
            draft.parts[i] = fresh[place]
            if (key := draft.keys[i]) is not None:
                self._memo.put(tenant, key, fresh[place], now)


def _slices(count: int) -> list[range]:
    return [range(start, min(start + SLICE, count)) for start in range(0, count, SLICE)]


def _encode(model: TokenizerModel, draft: Draft) -> list[bytes]:
    encode = model.encode if model.segmented or draft.covered else model.encode_whole
    return encode([str(draft.parts[i]) for i in draft.missing])


def _joined(draft: Draft) -> Tokens:
    # A text that is left would raise here.
    return Tokens(b"".join(cast(list[bytes], draft.parts)), draft.memo_tokens, draft.covered)


def draw(model: TokenizerModel, request: Request, key: bytes, max_model_len: int) -> Draft:
    """Renders, cuts and hashes; pure but for its cost. `key` is the memo's for this scope.

    :raises BadRequest: see `Workshop.begin`."""
    draft = _prompt(model, request, key, max_model_len)
    if request.said:
        intake.check_ids(request.said, model.vocab_size, "resume.token_ids")
        draft.parts.append(pack(request.said))
        draft.keys.append(None)
    return draft


def _prompt(model: TokenizerModel, request: Request, key: bytes, max_model_len: int) -> Draft:
    def refuse_if_hopeless(chars: int) -> None:
        intake.refuse_if_hopeless(request, chars, model.longest_token_chars, max_model_len)

    if isinstance(request.prompt, list):
        intake.check_ids(request.prompt, model.vocab_size)
        return Draft([pack(request.prompt)], [None], False)
    chat = request.chat
    if chat is None:
        refuse_if_hopeless(len(request.prompt))
        return _drawn(model, request.prompt, key, None, dress=request.add_special_tokens)
    refuse_if_hopeless(render.text_chars(chat))
    text, sentinels = _rendered(model, chat)
    # Now with tools, documents and all that the template adds.
    refuse_if_hopeless(len(text))
    return _drawn(model, text, key, sentinels, dress=chat.add_special_tokens)


def _rendered(model: TokenizerModel, chat: render.Chat) -> tuple[str, Sentinels | None]:
    if not model.chats:
        raise BadRequest("The model has no chat template.", field="messages", remedy="Send prompt instead.")
    try:
        given = {
            "messages": render.conversation(chat.messages, model.content_format),
            "tools": render.tool_schemas(chat.tools),
            "documents": chat.documents,
            "kwargs": model.accepts(chat.template_kwargs),
        }
        given, sentinels = model.shield.cover(given)
    except RecursionError as exc:
        raise BadRequest("Values are nested too deeply.", field="messages") from exc
    return model.render(given["messages"], given["tools"], given["documents"], chat, given["kwargs"]), sentinels


def _drawn(model: TokenizerModel, text: str, key: bytes, sentinels: Sentinels | None, *, dress: bool) -> Draft:
    """`dress`: with the ids that the tokenizer puts around a text."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise BadRequest("A text holds half a character (a lone surrogate).", field="messages") from exc
    parts: list[bytes | str] = [model.prefix] if dress else []
    keys: list[bytes | None] = [None] if dress else []
    if not model.segmented and sentinels is None:
        parts.append(text)
        keys.append(None)
    else:
        for part in model.segmenter.split(text):
            if isinstance(part, int):
                parts.append(pack([part]))
                keys.append(None)
                continue
            plain = part if sentinels is None else sentinels.restore(part)
            for piece in model.segmenter.cut(plain):
                parts.append(piece)
                keys.append(memo.text_key(key, piece) if model.segmented else None)
    if dress:
        parts.append(model.suffix)
        keys.append(None)
    return Draft(parts, keys, sentinels is not None)
