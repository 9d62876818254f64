"""How vLLM is started."""

import json

import msgspec
import pytest

from prefixbus.engine_vllm import flags

SETTINGS = flags.Settings(
    weights="/w",
    tokenizer="/t",
    served_model_name="m",
    port=8000,
    block_size=32,
    max_model_len=4096,
    events="tcp://127.0.0.1:5557",
    replay="tcp://127.0.0.1:5558",
    topic="kv@w1",
)


def value_of(command: list[str], flag: str) -> str:
    return command[len(command) - command[::-1].index(flag)]


def test_it_listens_on_this_machine_alone() -> None:
    command = flags.command("python", SETTINGS)

    assert value_of(command, "--host") == "127.0.0.1"


def test_its_events_go_where_the_bridge_listens() -> None:
    command = flags.command("python", SETTINGS)

    config = json.loads(value_of(command, "--kv-events-config"))
    assert config["enable_kv_cache_events"] is True
    assert (config["endpoint"], config["replay_endpoint"]) == (SETTINGS.events, SETTINGS.replay)


def test_what_is_said_besides_comes_last_and_wins() -> None:
    command = flags.command("python", SETTINGS, ["--max-model-len", "512"])

    assert value_of(command, "--max-model-len") == "512"


def test_it_takes_its_answers_apart_as_the_model_is_said_to() -> None:
    parsers = msgspec.structs.replace(SETTINGS, tool_parser="hermes", reasoning_parser="qwen3")

    command = flags.command("python", parsers)

    assert "--enable-auto-tool-choice" in command
    assert (value_of(command, "--tool-call-parser"), value_of(command, "--reasoning-parser")) == ("hermes", "qwen3")
    assert not any("parser" in word or "auto-tool" in word for word in flags.command("python", SETTINGS))


def test_its_memory_decides_how_many_blocks_it_has_unless_that_is_said() -> None:
    assert "--num-gpu-blocks-override" not in flags.command("python", SETTINGS)


@pytest.mark.parametrize(
    ("cores", "of", "shares"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([4, 5, 6], 2, [[4], [5]]),
        ([0, 1], 3, [[0], [1], [0]]),
    ],
)
def test_engines_compute_on_cores_of_their_own_while_there_are_enough(
    cores: list[int], of: int, shares: list[list[int]]
) -> None:
    assert [flags.share_of(cores, number, of) for number in range(of)] == shares
