# ruff: noqa: TID251 - the tokenizer library takes seconds to import, so it is imported in a thread of the event loop
"""Chat messages to prompt text, by the model's own template through transformers (imported with the first chat).

Owns: how vLLM flattens messages before the template sees them.   Must not know: HTTP, the engine.
Difference from vLLM: only an engine that takes images hands content parts to its template, and always does; any other
flattens them to one string."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import orjson

from .api import BadRequest

Render = Callable[..., str]


class ChatTemplate:
    def __init__(self, model_dir: Path, takes_images: bool = False) -> None:
        self._model_dir = model_dir
        self._shape = with_parts if takes_images else flatten
        self._render: Render | None = None
        self._loading = asyncio.Lock()

    async def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any] | None,
    ) -> str:
        """:raises BadRequest: the template refuses the messages, or there is none."""
        if self._render is None:
            async with self._loading:
                if self._render is None:
                    self._render = await asyncio.to_thread(_load, self._model_dir)
        try:
            return self._render(
                [self._shape(message) for message in messages],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except (
            Exception
        ) as error:  # whatever a template raises (jinja's own errors, ValueError, TypeError) is the client's
            raise BadRequest(str(error)) from error


def flatten(message: dict[str, Any]) -> dict[str, Any]:
    """One message as vLLM shows it to a template: text parts joined by newlines, no content is empty content, and the
    arguments of past tool calls are objects, not JSON text.

    :raises BadRequest: a part is not text."""
    flat = dict(message)
    content = message.get("content")
    if content is None:
        flat["content"] = ""
    elif isinstance(content, list):
        flat["content"] = "\n".join(_text_of(part) for part in content)
    if calls := message.get("tool_calls"):
        flat["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return flat


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The same for a template that goes over parts: an image is one without content.

    :raises BadRequest: a part is neither text nor an image."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    return flatten({**message, "content": None}) | {"content": [_shown(part) for part in parts]}


def _shown(part: Any) -> dict[str, str]:
    return {"type": "image"} if is_image(part) else {"type": "text", "text": _text_of(part)}


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def has_images(messages: list[dict[str, Any]]) -> bool:
    contents = (message.get("content") for message in messages)
    return any(is_image(part) for content in contents if isinstance(content, list) for part in content)


def image_names(messages: list[dict[str, Any]]) -> list[str]:
    """What each image is called: what the client calls it (`uuid`), else a digest of where it is.

    :raises BadRequest: one is nowhere."""
    names = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not is_image(part):
                continue
            url = (part.get("image_url") or {}).get("url")
            if not isinstance(url, str) or not url.startswith("data:image/"):
                raise BadRequest("The image cannot be loaded.", "messages")
            names.append(str(part.get("uuid") or hashlib.sha256(url.encode()).hexdigest()))
    return names


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise BadRequest(f"content part {kind!r} is not supported: this engine simulator reads text only.", "messages")


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = orjson.loads(arguments) if arguments else {}
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"tool call arguments are not JSON: {error}", "messages") from error
    return call | {"function": function | {"arguments": parsed}}


def _load(model_dir: Path) -> Render:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    return cast(Render, tokenizer.apply_chat_template)
