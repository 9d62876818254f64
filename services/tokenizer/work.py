# ruff: noqa: TID251, RUF100 - decides what runs in which thread
"""A request's prompt as token ids, without ever holding up the event loop.

Small work runs where it is, since a thread costs more; the rest runs in threads, where the batch call leaves the GIL
alone. Long prompts have a lane of their own, one thread fewer than cores: they wait for each other, nothing waits for
them.

    render, split, hash   in place up to RENDER_INLINE_CHARS
    encode what the memo lacks   in place up to ENCODE_INLINE_CHARS, in the long lane from LONG_CHARS

Owns: lanes, thresholds, the memo's use.   Must not know: NATS, headers.
Units: characters, seconds.   Source: facts/index.md (`encode` in a thread holds the GIL; 2-3 us/token); tests/bench."""

import os
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio import CapacityLimiter

from ..bus.clock import Clock
from ..bus.errors import BadRequest
from . import intake, memo, render
from .intake import Request
from .model import TokenizerModel, pack
from .sentinels import Sentinels

# Hashing and splitting are 3 ns a character: 0.5 ms here.
RENDER_INLINE_CHARS = 128 * 1024
# 1 ms in English, 3 ms in Chinese; a hop to a thread and back is 0.1 ms.
ENCODE_INLINE_CHARS = 2048
LONG_CHARS = 64 * 1024

T = TypeVar("T")


class Tokens(msgspec.Struct, frozen=True):
    """Ids u32 LE; how many of them came out of the memo; whether the client's texts held special tokens."""

    ids: bytes
    memo_tokens: int
    covered: bool


class _Plan(msgspec.Struct):
    """A prompt as ids and texts, in order; `keys` has a memo key for each text, or None where it stands alone."""

    parts: list[bytes | str]
    keys: list[bytes | None]
    covered: bool


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

    async def run(self, chars: int, inline_chars: int, work: Callable[..., T], *args: object) -> T:
        """`work(*args)`, in place if `chars` is small enough, else in a thread of the lane for its length."""
        if chars <= inline_chars:
            return work(*args)
        limiter = self._long if chars >= LONG_CHARS else self._short
        return await anyio.to_thread.run_sync(work, *args, limiter=limiter)

    async def tokens(
        self, model: TokenizerModel, tenant: str, scope: str, request: Request, max_model_len: int
    ) -> Tokens:
        """:raises BadRequest: the prompt cannot be rendered, holds foreign ids, or is hopelessly too long."""
        if isinstance(request.prompt, list):
            ids = request.prompt
            return Tokens(await self.run(len(ids), RENDER_INLINE_CHARS, _checked, ids, model.vocab_size), 0, False)
        chars = render.text_chars(request.chat) if request.chat is not None else len(request.prompt)
        intake.refuse_if_hopeless(request, chars, model.longest_token_chars, max_model_len)
        key = memo.scope_key(self._secret, model.revisions.tokenizer, scope)
        plan = await self.run(chars, RENDER_INLINE_CHARS, _plan, model, request, key)
        return await self._encoded(model, tenant, plan)

    async def _encoded(self, model: TokenizerModel, tenant: str, plan: _Plan) -> Tokens:
        now = self._clock.now()
        out: list[bytes] = []
        missing: list[int] = []
        remembered = 0
        for i, (part, key) in enumerate(zip(plan.parts, plan.keys, strict=True)):
            if isinstance(part, bytes):
                out.append(part)
                continue
            ids = self._memo.get(tenant, key, now) if key is not None else None
            if ids is None:
                missing.append(i)
            else:
                remembered += len(ids) // 4
            out.append(ids or b"")
        if missing:
            texts = [str(plan.parts[i]) for i in missing]
            encode = model.encode if model.segmented or plan.covered else model.encode_whole
            fresh = await self.run(sum(map(len, texts)), ENCODE_INLINE_CHARS, encode, texts)
            for i, ids in zip(missing, fresh, strict=True):
                out[i] = ids
                if (key := plan.keys[i]) is not None:
                    self._memo.put(tenant, key, ids, now)
        return Tokens(b"".join(out), remembered, plan.covered)


def _checked(ids: list[int], vocab_size: int) -> bytes:
    intake.check_ids(ids, vocab_size)
    return pack(ids)


def _plan(model: TokenizerModel, request: Request, key: bytes) -> _Plan:
    """Renders, cuts and hashes; pure but for its cost."""
    if request.chat is None:
        return _planned(model, str(request.prompt), key, None, dress=request.add_special_tokens)
    return _plan_chat(model, request.chat, key)


def _plan_chat(model: TokenizerModel, chat: render.Chat, key: bytes) -> _Plan:
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
    text = model.render(given["messages"], given["tools"], given["documents"], chat, given["kwargs"])
    return _planned(model, text, key, sentinels, dress=chat.add_special_tokens)


def _planned(model: TokenizerModel, text: str, key: bytes, sentinels: Sentinels | None, *, dress: bool) -> _Plan:
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
    return _Plan(parts, keys, sentinels is not None)
