"""Every field of vLLM's own requests: passed on, refused by name, or known to be nobody's loss."""

import json
import subprocess

import pytest
from support.vllm import PYTHON

from prefixbus.bus.config import LimitsSection
from prefixbus.bus.errors import PrefixbusError, Unsupported
from prefixbus.tokenizer import intake

# vLLM's modules are read from disk.
pytestmark = pytest.mark.timeout(300)

NOBODYS_LOSS = {
    "length_penalty": "speaks of beams alone, which are refused",
    "session_id": "a hint to a balancer of vLLM's own",
    "user": "a label of the client's, as in OpenAI's API",
}
ASKED = """
import json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
print(json.dumps([sorted(ChatCompletionRequest.model_fields), sorted(CompletionRequest.model_fields)]))
"""


def test_nothing_that_vllm_takes_is_dropped_without_a_word() -> None:
    asked = subprocess.run([PYTHON, "-c", ASKED], capture_output=True, text=True, check=True)
    chat, completions = json.loads(asked.stdout.splitlines()[-1])

    assert {"messages", "seed"} <= set(chat) and {"prompt", "seed"} <= set(completions)
    for fields, body in ((chat, intake._ChatBody), (completions, intake._CompletionsBody)):
        assert set(fields) - {*body.__struct_fields__, *NOBODYS_LOSS} - refused(set(fields)) == set()


def refused(names: set[str]) -> set[str]:
    """Those that a completion may not have."""
    found = set()
    for name in names:
        try:
            intake.parse(json.dumps({"prompt": "p", name: 1}).encode(), "m", LimitsSection())
        except Unsupported as exc:
            assert name == exc.field, exc
            found.add(name)
        except PrefixbusError:
            pass
    return found
