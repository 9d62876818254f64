"""Several prompts in one request for completions, as OpenAI serves them: each is a request of its own on the bus, and
their answers are one.

    choices     of prompt i, with n choices each: i * n to i * n + n - 1
    usage       the sums, in one last chunk; what one of the answers does not say is not said of the whole
    id          one for all; what is the same in every chunk (`created`, the model) is the first one's
    an error    of one prompt is the answer's, and names it: `prompt[2]: is empty.`

Owns: this arithmetic.   Must not know: HTTP, the bus, how many are asked at once.
Source: OpenAI API reference, "Completions" (`prompt`: string or array); the order of choices is vLLM's, too."""

from typing import Any

from ..bus.errors import BadRequest, PrefixbusError

# Of one request. Ids of prompts have two digits more than the request's.
MAX_PROMPTS = 64
_FIELD = "prompt: "


def bodies(body: dict[str, Any]) -> list[dict[str, Any]]:
    """One body for each prompt; the body itself if there is one, or none that could be several.

    :raises BadRequest: there are more than `MAX_PROMPTS`."""
    prompts = body.get("prompt")
    if not isinstance(prompts, list) or len(prompts) < 2 or not any(isinstance(each, str | list) for each in prompts):
        return [body]
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(
            f"holds {len(prompts)} prompts; one request takes {MAX_PROMPTS}.",
            field="prompt",
            remedy="Send several requests.",
        )
    return [{**body, "prompt": prompt} for prompt in prompts]


def id_of(request_id: str, number: int) -> str:
    """The id of a prompt's request; the first one has that of the whole."""
    return f"{request_id}-{number}" if number else request_id


def of_prompt(error: PrefixbusError, number: int) -> PrefixbusError:
    """The same error, as that of the whole request."""
    sentence = error.sentence()
    named = f"prompt[{number}]: {sentence.removeprefix(_FIELD)}" if sentence.startswith(_FIELD) else sentence
    same = type(error)(named)
    same.retry_after_s = error.retry_after_s
    return same


class Several:
    """Chunks of the answers to several prompts, in whatever order they come, as chunks of one answer."""

    def __init__(self, bodies: list[dict[str, Any]], completion_id: str) -> None:
        asked = bodies[0].get("n")
        self._choices_each = asked if isinstance(asked, int) else 1
        self._prompts = len(bodies)
        self._id = completion_id
        self._head: dict[str, Any] = {}
        self._usages: list[dict[str, Any]] = []

    def taken(self, number: int, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """The chunk as it is of the whole; None if it says only usage, which is kept."""
        if not self._head:
            self._head = {name: value for name, value in chunk.items() if name not in ("choices", "usage")}
            self._head["id"] = self._id
        if usage := chunk.pop("usage", None):
            self._usages.append(usage)
        if not chunk["choices"]:
            return None
        for choice in chunk["choices"]:
            choice["index"] = number * self._choices_each + choice.get("index", 0)
        return {**chunk, **self._head}

    def last(self) -> dict[str, Any]:
        """The chunk that says usage."""
        is_known = len(self._usages) == self._prompts
        return {**self._head, "choices": [], "usage": _sum(self._usages) if is_known else None}


def _sum(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers added, objects field by field; a field that one part lacks is left out."""
    whole: dict[str, Any] = {}
    for name in parts[0]:
        values = [part.get(name) for part in parts]
        if all(isinstance(value, int) for value in values):
            whole[name] = sum(value for value in values if value is not None)
        elif all(isinstance(value, dict) for value in values):
            whole[name] = _sum([value for value in values if value is not None])
    return whole
