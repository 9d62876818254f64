"""A chat as its template is given it: what vLLM hands to `apply_chat_template`, from what OpenAI clients send.

    content    a template that loops over content parts gets a list of them, any other one text, parts joined by "\\n";
               an image is a part without content, and has no place in one text
    null       no parts: "" or []
    tool calls arguments become an object, {} if they are not JSON; an empty list of calls is left out
    tools      type and function alone; of that name, description and parameters, null where they are missing, and
               strict and defer_loading where they are not null; nothing else that a client may have put there

Owns: that shape.   Must not know: templates, tokenizers, NATS.
Source: vLLM `entrypoints/chat_utils.py` (_parse_chat_message_content, _postprocess_messages), `renderers/hf.py`
(content format), `entrypoints/openai/*/protocol.py` (tools, template arguments)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from .media import Medium

ContentFormat = Literal["string", "openai"]


class Message(msgspec.Struct, frozen=True):
    """One message; `parts` are its texts and media in order (none for null content), `tools` a developer's own."""

    role: str
    parts: list[str | Medium]
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    tools: Any = None


class Chat(msgspec.Struct, frozen=True):
    """What of a chat request goes into the prompt."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: dict[str, Any] = {}


def conversation(messages: Sequence[Message], content_format: ContentFormat) -> list[dict[str, Any]]:
    """The messages as dicts, keys in vLLM's order."""
    return [_message(message, content_format) for message in messages]


def tool_schemas(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    return [_tool_schema(tool) for tool in tools]


def _tool_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = tool["function"]
    function = {name: given.get(name) for name in ("name", "description", "parameters")}
    schema: dict[str, Any] = {"type": tool.get("type", "function"), "function": function}
    deferred = tool.get("defer_loading")
    own = given.get("defer_loading")
    told = {"strict": given.get("strict"), "defer_loading": deferred if own is None else own}
    function |= {name: value for name, value in told.items() if value is not None}
    if deferred is not None:
        schema["defer_loading"] = deferred
    return schema


def text_chars(chat: Chat) -> int:
    """About how long the prompt will be: the characters of all contents (tools and documents are not counted)."""
    return sum(len(part) for message in chat.messages for part in message.parts if isinstance(part, str))


def _message(message: Message, content_format: ContentFormat) -> dict[str, Any]:
    content: str | list[dict[str, str]]
    if content_format == "openai" and message.role != "tool":
        content = [_part(part) for part in message.parts if isinstance(part, str) or part.is_image]
    else:
        content = "\n".join(part for part in message.parts if isinstance(part, str))
    result: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "assistant":
        if message.tool_calls:
            result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
        if message.reasoning is not None:
            result["reasoning"] = result["reasoning_content"] = message.reasoning
    elif message.role == "tool" and message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    if message.role == "developer":
        result["tools"] = message.tools
    return result


def _part(part: str | Medium) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    elif not isinstance(arguments, dict | list):
        arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments}}
