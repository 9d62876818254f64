"""What a request can ask of an engine, and what its client gets: tools, reasoning, choices, log probabilities, answers
that go on elsewhere, and every way in which an engine fails one."""

import contextlib
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.nats import eventually

from prefixbus.bus.messages import Job
from prefixbus.worker_bridge.engine import Generation, Progress, VllmHttp

from .bridge_world import BLOCK, MODEL, WORKER, Answer, World, prompt, world

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "send"}},
]
MESSAGES = [{"role": "user", "content": "ban"}]
PARSERS: dict[str, str | None] = {
    "tool_call_parser": "hermes",
    "enable_auto_tool_choice": "",
    "reasoning_parser": "qwen3",
}


@pytest.fixture
async def reading(tmp_path: Path) -> AsyncIterator[World]:
    """An engine that reads its own output."""
    async with world(tmp_path, engine=PARSERS) as here:
        yield here


def chat_job(at: World, seed: int, *, asked: dict[str, Any] | None = None, **changes: Any) -> Job:
    return at.job(prompt(seed, 5 * BLOCK), chat=json.dumps({"messages": MESSAGES, **(asked or {})}).encode(), **changes)


def deltas(answer: Answer) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in answer.chunks for choice in chunk["choices"]]


def finish_reason(answer: Answer) -> str:
    (reason,) = {choice["finish_reason"] for chunk in answer.chunks for choice in chunk["choices"]} - {None}
    return str(reason)


def prompts_counted(at: World, verdict: str) -> float:
    labels = {"model": MODEL, "verdict": verdict}
    return at.registry.get_sample_value("prefixbus_bridge_engine_prompts_total", labels) or 0.0


# -- the engine's chat endpoint


async def test_a_forced_call_is_read_by_the_engine_out_of_our_own_prompt(reading: World) -> None:
    async with reading.serving() as bridge:
        asked = {"tools": TOOLS, "tool_choice": "required"}
        cold, warm = (chat_job(reading, 1, asked=asked, params={"max_tokens": 60}) for _ in range(2))

        await reading.ask(cold)
        answer = await reading.ask(warm)

        calls = [delta for made in deltas(answer) for delta in made.get("tool_calls", [])]
        assert [call["function"]["name"] for call in calls if "id" in call] == ["lookup", "send"]
        assert (
            "".join(call["function"].get("arguments", "") for call in calls if call["index"] == 0)
            == '{"city":"made up"}'
        )
        assert finish_reason(answer) == "tool_calls"
        assert deltas(answer)[0]["role"] == "assistant" and "content" not in deltas(answer)[0]
        # Of five blocks the last is computed again: its last token is needed.
        outcome = await reading.outcome(warm)
        assert (outcome.cached_tokens, outcome.engine_differs_at) == (4 * BLOCK, None)
        assert answer.chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4 * BLOCK}
        assert (prompts_counted(reading, "same"), prompts_counted(reading, "differs")) == (2, 0)
        await reading.until_idle(bridge)


async def test_reasoning_is_told_apart_and_counted(reading: World) -> None:
    async with reading.serving() as bridge:
        shown = chat_job(reading, 2, params={"max_tokens": 6})
        hidden = chat_job(reading, 2, asked={"include_reasoning": False}, params={"max_tokens": 6})

        answers = [await reading.ask(job) for job in (shown, hidden)]

        told = ["reasoning" if "reasoning" in delta else "content" for delta in deltas(answers[0])]
        assert (told[0], told[-1]) == ("reasoning", "content") and told == sorted(told, reverse=True)
        assert answers[0].chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
        assert not any("reasoning" in delta for delta in deltas(answers[1]))
        assert answers[1].text == answers[0].text
        await reading.until_idle(bridge)


async def test_a_chat_that_the_engine_reads_is_aborted_by_a_cancel(slow: World) -> None:
    async with slow.serving() as bridge:
        job = chat_job(slow, 1, params={"max_tokens": 1500})
        answer = await slow.listen(job)
        await slow.send(slow.dispatch(job))
        await eventually(lambda: len(answer.chunks) > 5, "the answer has begun")

        await slow.cancel(job)

        await eventually(lambda: bool(answer.finals), "the end")
        assert answer.finals[0]["Pb-Error"] == "cancelled"
        await slow.until_idle(bridge)


async def test_a_chat_whose_client_is_gone_is_aborted(slow: World) -> None:
    async with slow.serving() as bridge:
        job = chat_job(slow, 1, params={"max_tokens": 1500})
        answer = await slow.listen(job)
        await slow.send(slow.dispatch(job))
        await eventually(lambda: len(answer.chunks) > 5, "the answer has begun")

        await answer.subscription.unsubscribe()

        assert (await slow.outcome(job)).error == "cancelled"
        await slow.until_idle(bridge)


class Rerendering(VllmHttp):
    """An engine that renders chats itself, and otherwise than we do."""

    tells = True

    @contextlib.asynccontextmanager
    async def generate(self, request: Generation) -> AsyncIterator[AsyncIterator[Progress]]:
        if request.is_chat:
            theirs = [*array("I", request.tokens)[:3], *prompt(77, 4 * BLOCK)]
            request = msgspec.structs.replace(request, tokens=array("I", theirs).tobytes())
        async with super().generate(request) as progress:
            yield self._told(progress)

    async def _told(self, progress: AsyncIterator[Progress]) -> AsyncIterator[Progress]:
        async for step in progress:
            yield step if self.tells else msgspec.structs.replace(step, prompt=None)


@pytest.mark.parametrize("tells", [True, False], ids=["it says so", "it says nothing"])
async def test_a_prompt_that_the_engine_made_otherwise_is_answered_and_credited_to_nobody(
    tmp_path: Path, tells: bool
) -> None:
    """What it took from its cache for its own prompt is far more than the index holds of ours: no wrong hit."""
    async with world(tmp_path, engine=PARSERS) as here:
        engine = Rerendering(here.engine.url, MODEL)
        engine.tells = tells
        async with here.bridge(engine) as bridge:
            await here.until_serving(bridge)
            jobs = [chat_job(here, 1, params={"max_tokens": 8}) for _ in range(2)]

            answers = [await here.ask(job) for job in jobs]

            outcomes = [await here.outcome(job) for job in jobs]
            assert all(answer.text and finish_reason(answer) == "length" for answer in answers)
            assert [outcome.cached_tokens for outcome in outcomes] == [None, None]
            assert [outcome.engine_differs_at for outcome in outcomes] == [3 if tells else None] * 2
            assert all("prompt_tokens_details" not in answer.chunks[-1]["usage"] for answer in answers)
            assert prompts_counted(here, "differs" if tells else "untold") == 2
            assert repr(bridge.streams.hits) == "<HitCheck 0 in doubt>"
            assert here.metric("prefixbus_wrong_hits_total") == 0
            # What it holds is known by what it is, and a request by token ids is credited as ever.
            plain = here.job([*prompt(1, 5 * BLOCK)[:3], *prompt(77, 4 * BLOCK)])
            await here.ask(plain)
            assert (await here.outcome(plain)).cached_tokens == 4 * BLOCK
            await here.until_idle(bridge)


async def test_a_chat_that_the_engine_refuses_is_refused_with_its_sentence(tmp_path: Path) -> None:
    async with world(tmp_path) as here, here.serving() as bridge:
        answer = await here.ask(chat_job(here, 1, asked={"tools": TOOLS}))

        (end,) = answer.finals
        assert end["Pb-Error"] == "bad_request"
        assert "--enable-auto-tool-choice and --tool-call-parser" in end["Nats-Service-Error"]
        await here.until_idle(bridge)


# -- choices and log probabilities by token ids


async def test_several_choices_come_under_their_numbers(reading: World) -> None:
    async with reading.serving() as bridge:
        job = reading.job(prompt(3, 20), params={"n": 3, "max_tokens": 5}, include_usage=True)

        answer = await reading.ask(job)

        texts = ["", "", ""]
        for chunk in answer.chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        assert len(set(texts)) == 3 and all(texts)
        roles = [c["index"] for chunk in answer.chunks for c in chunk["choices"] if "role" in c["delta"]]
        assert sorted(roles) == [0, 1, 2]
        assert answer.chunks[-1]["usage"]["completion_tokens"] == (await reading.outcome(job)).output_tokens == 15
        await reading.until_idle(bridge)


async def test_a_chats_log_probabilities_are_a_chats_by_either_endpoint(reading: World) -> None:
    async with reading.serving():
        plain = reading.job(prompt(4, 20), params={"logprobs": 2})
        read = reading.job(
            prompt(4, 20),
            params={"logprobs": True, "top_logprobs": 2},
            chat=json.dumps({"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}).encode(),
        )
        completion = reading.job(prompt(4, 20), params={"logprobs": 2}, kind="completions")

        one, two, three = [await reading.ask(job) for job in (plain, read, completion)]

        contents = [
            [entry for chunk in answer.chunks for choice in chunk["choices"] for entry in choice["logprobs"]["content"]]
            for answer in (one, two)
        ]
        assert contents[0] == contents[1]
        assert "".join(entry["token"] for entry in contents[0]) == one.text
        assert {len(entry["top_logprobs"]) for entry in contents[0]} == {2}
        tokens = [
            token for chunk in three.chunks for choice in chunk["choices"] for token in choice["logprobs"]["tokens"]
        ]
        assert tokens == [entry["token"] for entry in contents[0]]


async def test_the_first_chunk_says_what_was_decided(reading: World) -> None:
    async with reading.serving():
        answer = await reading.ask(reading.job(prompt(5, 20)), decision="partial-hit", predicted_tokens=8)

        told = {
            name: answer.headers(0).get(name) for name in ("Pb-Decision", "Pb-Prompt-Tokens", "Pb-Predicted-Tokens")
        }
        assert told == {"Pb-Decision": "partial-hit", "Pb-Prompt-Tokens": "20", "Pb-Predicted-Tokens": "8"}
        assert all("Pb-Decision" not in (message.headers or {}) for message in answer.messages[1:])


@pytest.mark.parametrize(("bridge", "told"), [({}, {}), ({"tells_worker": True}, {"Pb-Worker": WORKER})])
async def test_clients_are_told_of_workers_only_where_the_operator_allows_it(
    tmp_path: Path, bridge: dict[str, Any], told: dict[str, str]
) -> None:
    async with world(tmp_path, bridge=bridge) as here, here.serving():
        answer = await here.ask(here.job(prompt(5, 20)))

        naming = [item for message in answer.messages for item in (message.headers or {}).items() if WORKER in item]
        assert dict(naming) == told


# -- answers that go on elsewhere


def said(answer: Answer) -> list[int]:
    return [token for chunk in answer.chunks for choice in chunk["choices"] for token in choice["token_ids"]]


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[World]:
    """An engine that takes time for its tokens: some are passed on before it fails."""
    async with world(tmp_path, engine={**PARSERS, "profile": "h100-8b"}) as here:
        yield here


@pytest.mark.parametrize("params", [{}, {"stop": ["NO!", "?"]}], ids=["plain", "with stops"])
async def test_an_answer_that_broke_off_goes_on_as_if_it_had_not(slow: World, params: dict[str, Any]) -> None:
    async with slow.serving() as bridge:
        tokens = prompt(6, 3 * BLOCK)
        whole = await slow.ask(slow.job(tokens, params={"max_tokens": 50, **params}, resumable=True))
        await slow.engine.post("/sim/fault", {"kind": "reset", "after_tokens": 40})

        broken = await slow.ask(slow.job(tokens, params={"max_tokens": 50, **params}, resumable=True))
        had = said(broken)
        rest = slow.job(
            tokens + had,
            params={"max_tokens": 50 - len(had), **params},
            resumable=True,
            said_tokens=len(had),
        )
        resumed = await slow.ask(rest)

        (end,) = broken.finals
        assert (end["Pb-Error"], end["Pb-Resume"]) == ("worker_lost", "resumable")
        assert 0 < len(had) <= 40
        assert had + said(resumed) == said(whole)
        assert broken.text + resumed.text == whole.text
        assert not any("role" in delta for delta in deltas(resumed))
        counts = [answer.chunks[-1]["usage"] for answer in (whole, resumed)]
        assert [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in counts] == [(24, 50)] * 2
        assert resumed.headers(0)["Pb-Prompt-Tokens"] == "24"
        assert (await slow.outcome(rest)).prompt_tokens == 24 + len(had)
        await slow.until_idle(bridge)


async def test_who_did_not_ask_for_it_gets_no_tokens_and_cannot_resume(slow: World) -> None:
    async with slow.serving():
        await slow.engine.post("/sim/fault", {"kind": "reset", "after_tokens": 40})

        broken = await slow.ask(slow.job(prompt(7, 20), params={"max_tokens": 50}))

        assert all("token_ids" not in choice for chunk in broken.chunks for choice in chunk["choices"])
        assert broken.finals[0]["Pb-Resume"] == "not_resumable"


# -- engines that fail


async def until_given_back(at: World, job: Job) -> None:
    await eventually(lambda: at.accepts[job.request_id, 1][-1].refused != "", "it is given back")


def either_way(at: World, seed: int) -> list[Job]:
    params = {"max_tokens": 50}
    return [at.job(prompt(seed, 20), params=params), chat_job(at, seed, params=params)]


@pytest.mark.parametrize(
    ("kind", "word"), [("error", "engine_failed"), ("full", "overloaded"), ("reset", "worker_lost")]
)
async def test_what_fails_before_its_first_token_is_given_back_and_says_nothing(
    reading: World, kind: str, word: str
) -> None:
    async with reading.serving() as bridge:
        for job in either_way(reading, 8):
            await reading.engine.post("/sim/fault", {"kind": kind})
            silent = await reading.listen(job)

            await reading.send(reading.dispatch(job))

            await until_given_back(reading, job)
            assert [accept.refused for accept in reading.accepts[job.request_id, 1]] == ["", word]
            # Another one is answered, by the same engine.
            await reading.ask(reading.job(prompt(9, 20)))
            assert not silent.messages
            assert all(outcome.request_id != job.request_id for outcome in reading.outcomes)
        await reading.until_idle(bridge)


@pytest.mark.parametrize(
    ("kind", "code"), [("error", "engine_failed"), ("abort", "engine_failed"), ("reset", "worker_lost")]
)
async def test_what_fails_after_its_first_token_is_ended_once_with_its_error(slow: World, kind: str, code: str) -> None:
    async with slow.serving() as bridge:
        for job in either_way(slow, 8):
            await slow.engine.post("/sim/fault", {"kind": kind, "after_tokens": 40})

            answer = await slow.ask(job)

            (end,) = answer.finals
            assert (end["Pb-Error"], end["Pb-Seq"]) == (code, str(len(answer.chunks)))
            assert (end["Pb-Resume"], len(answer.chunks) > 0) == ("not_resumable", True)
            assert (await slow.outcome(job)).error == code
            await slow.ask(slow.job(prompt(9, 20)))
        await slow.until_idle(bridge)


async def test_an_engine_that_hangs_within_an_answer_leaves_it_to_the_router(tmp_path: Path) -> None:
    """It keeps its connection and says nothing: no heartbeat goes out for it, and its lease runs out."""
    async with world(tmp_path, engine={"profile": "h100-8b"}) as here, here.serving() as bridge:
        job = here.job(prompt(1, 20), params={"max_tokens": 1500})
        answer = await here.listen(job)
        await here.send(here.dispatch(job))
        await eventually(lambda: len(answer.chunks) > 2, "the answer has begun")

        here.engine.pause()

        words = here.accepts[job.request_id, 1]
        await eventually(lambda: words[-1].refused == "worker_lost", "it is the router's to end", 12)
        assert [accept.refused for accept in words][-2:] == ["started", "worker_lost"]
        assert not answer.finals
        here.engine.go_on()
        await here.ask(here.job(prompt(2, 20)))
        await here.until_idle(bridge)
