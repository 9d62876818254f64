"""Two engines told the same, and what they do compared: a stand-in and the real one.

A scenario is a function of a `Side` that returns plain values; what names, hashes, times and generated words are called
in them is made the same for both before they are compared, nothing else is."""

import contextlib
import http.client
import json
import random
import time
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq
from prometheus_client.parser import text_string_to_metric_families

TOPIC = "kv@likeness"
BLOCK = 32
# What a test waits for, it waits so long for.
DEADLINE_S = 240.0
ABSENT = "(absent)"

# Values that differ from engine to engine, or run to run, and mean nothing by themselves: their types are compared.
_BY_TYPE = frozenset(
    {
        "id",
        "created",
        "root",
        "endpoint",
        "replay_endpoint",
        "text",
        "content",
        "token",
        "token_ids",
        "bytes",
        "logprob",
    }
)
# Numbers and names of generated tokens; how many there are is compared.
_BY_LENGTH = frozenset({"token_logprobs", "tokens", "text_offset"})


class Side:
    """One of the two: an engine at `url` that publishes its KV events to `events`, which it connects to."""

    def __init__(self, name: str, url: str, events: str, replay: str) -> None:
        self.name = name
        self.replay_endpoint = replay
        self._host = urlsplit(url).netloc
        self._context = zmq.Context()
        self._events: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._events.subscribe("")
        self._events.bind(events)
        self._fences = 0
        self._random = random.Random(0)
        self._known: dict[str, list[int]] = {}
        self.last_seq = -1

    def close(self) -> None:
        self._context.destroy(linger=0)

    # -- HTTP

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str, bytes]:
        """Status, media type and body of the answer. `body`: bytes as they are, anything else as JSON."""
        with self._sent(method, path, body, headers) as response:
            kind = (response.getheader("Content-Type") or "").split(";")[0]
            return response.status, kind, response.read()

    def told(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """The same to be compared: what JSON says, or of what media type it is."""
        status, kind, answer = self.ask(method, path, body, headers)
        said = json.loads(answer) if kind == "application/json" else kind if answer else ""
        return {"status": status, "body": said}

    def complete(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """The answer to a completion of that prompt, of one token if nothing else is said."""
        status, _, answer = self.ask("POST", "/v1/completions", completion(prompt, **more))
        assert status == 200, answer
        body: dict[str, Any] = json.loads(answer)
        return body

    def cached(self, prompt: list[int], **more: Any) -> int:
        """How many of the prompt's tokens came from the cache."""
        return int(self.complete(prompt, **more)["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)

    @contextlib.contextmanager
    def stream(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Iterator[Iterator[Any]]:
        """The events of a stream as they come, `[DONE]` among them. Leaving it early hangs up."""
        with self._sent("POST", path, body | {"stream": True}, headers) as response:
            assert response.status == 200, response.read()
            yield _events_of(response)

    def streamed(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[Any]:
        with self.stream(path, body, headers) as events:
            return list(events)

    def begun(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The same, for what may be answered at length: hangs up as soon as it is."""
        with self._sent("POST", path, body | {"stream": True}, None) as response:
            if response.status != 200:
                return {"status": response.status, "body": json.loads(response.read())}
            next(_events_of(response))
            return {"status": 200, "body": "an answer"}

    def metrics(self) -> str:
        return self.ask("GET", "/metrics")[2].decode()

    @contextlib.contextmanager
    def _sent(
        self, method: str, path: str, body: Any, headers: dict[str, str] | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, timeout=DEADLINE_S)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
            yield connection.getresponse()
        finally:
            connection.close()

    # -- prompts

    def meet(self) -> None:
        """Returns when its events are heard: what it publishes before it is subscribed to is lost."""
        end = time.monotonic() + DEADLINE_S
        while not self._events.poll(1000):
            assert time.monotonic() < end, f"{self.name}: no events"
            self._fences += 1
            self.complete(list(range(100, 100 + BLOCK)), cache_salt=f"fence-{self._fences}")

    def begin(self) -> None:
        """An empty cache, nothing left to be told of, and the same prompts to come on both sides."""
        self.idle()
        assert self.told("POST", "/reset_prefix_cache")["body"] == {"success": True}
        self._random = random.Random(1)
        self._known = {}
        self.events()

    def prompt(self, name: str, tokens: int) -> list[int]:
        """Token ids that nothing else begins with; by that name in events."""
        made = [self._random.randrange(1000, 40_000) for _ in range(tokens)]
        self._known[name] = made
        return made

    def knows(self, name: str, tokens: list[int]) -> None:
        """Events may speak of these."""
        self._known[name] = tokens

    # -- events

    def events(self) -> list[list[dict[str, Any]]]:
        """The batches that came since they were last asked for, hashes by names given in order of their coming and
        tokens by where they stand in prompts."""
        names: dict[Any, str] = {}
        return [[self._event(event, names) for event in events] for _, (_, events, _) in self.batches() if events]

    def batches(self) -> list[tuple[int, list[Any]]]:
        """Those batches as they came, by seq. Complete: what has been answered has been told of."""
        self._fences += 1
        salt = f"fence-{self._fences}"
        self.idle()
        self.complete(list(range(100, 100 + BLOCK)), cache_salt=salt)
        came = []
        end = time.monotonic() + DEADLINE_S
        while True:
            assert self._events.poll(max(0, int((end - time.monotonic()) * 1000))), f"{self.name}: no events"
            topic, seq, payload = self._events.recv_multipart()
            assert topic == TOPIC.encode()
            self.last_seq = int.from_bytes(seq, "big")
            batch = msgspec.msgpack.decode(payload)
            is_fence = [_has_salt(event, salt) for event in batch[1]]
            batch[1] = [event for event, fence in zip(batch[1], is_fence, strict=True) if not fence]
            came.append((self.last_seq, batch))
            if any(is_fence):
                return came

    def replayed(self, first: int) -> list[list[bytes]]:
        """The frames of what a DEALER gets from `first` on, to the end that is told."""
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        with dealer:
            dealer.connect(self.replay_endpoint)
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
            got: list[list[bytes]] = []
            while not got or got[-1][-1]:
                assert dealer.poll(int(DEADLINE_S * 1000)), f"{self.name}: the replay does not end"
                got.append(dealer.recv_multipart())
            return got

    def hears_within_ms(self, milliseconds: int) -> bool:
        return bool(self._events.poll(milliseconds))

    def idle(self) -> None:
        """Waits until nothing runs."""
        end = time.monotonic() + DEADLINE_S
        while any(self.number(f"vllm:num_requests_{state}") for state in ("running", "waiting")):
            assert time.monotonic() < end, f"{self.name} still works"
            time.sleep(0.02)

    def number(self, name: str, label: str = "") -> float:
        """The sum of a metric's series, or of those that have a label of that value."""
        lines = [line for line in self.metrics().splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if not label or f'="{label}"' in line)

    def labels_of(self, name: str) -> dict[str, str]:
        """Those of a metric's only series."""
        (family,) = (each for each in text_string_to_metric_families(self.metrics()) if each.name == name)
        return dict(family.samples[0].labels)

    def metric_shapes(self, names: Collection[str]) -> dict[str, Any]:
        """Type and labels of each of these metrics, if it is there."""
        families = {family.name: family for family in text_string_to_metric_families(self.metrics())}
        return {
            name: [family.type, sorted({label for sample in family.samples for label in sample.labels})]
            for name in names
            if (family := families.get(name)) is not None
        }

    def _event(self, event: dict[str, Any], names: dict[Any, str]) -> dict[str, Any]:
        def name(key: Any) -> str:
            return names.setdefault(key, f"block {len(names)}")

        told = dict(event)
        if "block_hashes" in told:
            if told.get("parent_block_hash") is not None:
                told["parent_block_hash"] = name(told["parent_block_hash"])
            told["block_hashes"] = [name(key) for key in told["block_hashes"]]
        if tokens := told.get("token_ids"):
            told["token_ids"] = [self._place(tokens[at : at + BLOCK]) for at in range(0, len(tokens), BLOCK)]
        return told

    def _place(self, tokens: list[int]) -> str:
        for name, known in self._known.items():
            for at in range(0, len(known), BLOCK):
                if known[at : at + BLOCK] == tokens:
                    return f"{name} {at}..{at + BLOCK}"
        return "tokens of no prompt"


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True} | more


def _events_of(response: http.client.HTTPResponse) -> Iterator[Any]:
    for line in response:
        if line.strip():
            data = line.decode().removeprefix("data:").strip()
            yield data if data == "[DONE]" else json.loads(data)


def _has_salt(event: dict[str, Any], salt: str) -> bool:
    first = (event.get("extra_keys") or [None])[0] or []
    return any(salt == key or salt in key for key in first)


def alike(value: Any, name: str = "") -> Any:
    """A JSON value without what means nothing: see `_BY_TYPE` and `_BY_LENGTH`. A null is told as if it were absent,
    which no reader tells apart; vLLM writes a dozen of them into each chunk."""
    if name in _BY_LENGTH and isinstance(value, list):
        return f"{len(value)} of them"
    if name in _BY_TYPE:
        return type(value).__name__
    if isinstance(value, dict):
        if name == "top_logprobs":
            return f"{len(value)} of them"
        return {key: alike(each, key) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [alike(each, name) for each in value]
    return value


def in_stream(events: list[Any]) -> list[Any]:
    """The events of a stream, consecutive ones of a choice as one, whose log probabilities are not counted: an engine
    puts tokens together that a slow reader left. What opens a chat is not put together with what follows."""
    told: list[Any] = []
    for event in events:
        seen = _uncounted(alike(event))
        if told and _choice_of(told[-1]) == _choice_of(seen) != ABSENT:
            told[-1] = _joined(told[-1], seen)
        else:
            told.append(seen)
    return told


def _choice_of(event: Any) -> Any:
    """Which choice an event goes on with; none for what opens or ends a stream."""
    choices = event.get("choices") if isinstance(event, dict) else None
    return choices[0]["index"] if choices and "role" not in choices[0].get("delta", {}) else ABSENT


def _uncounted(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: "of them" if key in ("top_logprobs", *_BY_LENGTH) else _uncounted(each) for key, each in value.items()
        }
    return [_uncounted(each) for each in value] if isinstance(value, list) else value


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {key: _joined(one[key], each) if key in one else each for key, each in other.items()}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_joined(*pair) for pair in zip(one, other, strict=True)]
    return other


def differences(one: Any, other: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two JSON values differ: a path, and both values there."""
    if isinstance(one, dict) and isinstance(other, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in [*one, *(key for key in other if key not in one)]:
            found |= differences(one.get(key, ABSENT), other.get(key, ABSENT), f"{path}/{key}" if path else str(key))
        return found
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        found = {}
        for number, pair in enumerate(zip(one, other, strict=True)):
            found |= differences(*pair, f"{path}/{number}")
        return found
    return {} if type(one) is type(other) and one == other else {path: (one, other)}


def unlisted(found: dict[str, tuple[Any, Any]], known: Collection[str]) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """Differences that no pattern of paths (as of a shell) has, and patterns that no difference has."""
    new = {path: pair for path, pair in found.items() if not any(fnmatchcase(path, one) for one in known)}
    gone = [one for one in known if not any(fnmatchcase(path, one) for path in found)]
    return new, gone
