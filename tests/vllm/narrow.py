"""A deployment of one real engine with little room and a model that has much: tools, thinking, two adapters.

Room for one prompt of the greatest length and two blocks more, so that evictions come quickly."""

import asyncio
import json
import secrets
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from support.cluster import Answer, ask, outcome_of
from support.models import CHATML_WITH_TOOLS
from support.nats import eventually
from support.vllm import BLOCK, PYTHON, VllmCluster, tiny_weights

from prefixbus.bus.connection import Bus
from prefixbus.bus.messages import Outcome
from prefixbus.client import Client

from .story import Story, read

MODEL = "smollm2-tools"
WORKER = "w1"
ADAPTERS = ("french", "legal")
MAX_MODEL_LEN = 4096
# vLLM keeps one for itself.
KV_BLOCKS = MAX_MODEL_LEN // BLOCK + 2
STEP_TOKENS = 1024
HITS = "vllm:prefix_cache_hits_total"
# For what takes milliseconds on a machine that does nothing else; and for a whole test, which takes seconds there.
DEADLINE_S = 60.0
TEST_TIMEOUT_S = 300


class Narrow(VllmCluster):
    """Its engine calls the second adapter otherwise than we do."""

    def __init__(self, directory: Path) -> None:
        script = Path(__file__).parents[1] / "support" / "tiny_adapters.py"
        subprocess.run([PYTHON, script, tiny_weights(), directory, *ADAPTERS], check=True, capture_output=True)
        french, legal = (directory / name for name in ADAPTERS)
        flags = ["--num-gpu-blocks-override", str(KV_BLOCKS), "--max-num-batched-tokens", str(STEP_TOKENS)]
        flags += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
        flags += ["--lora-modules", f"french={french}", f"lora-legal={legal}"]
        super().__init__(directory, "--workers", "1", "--model", MODEL, "--engine-flags", shlex.join(flags))

    def init(self) -> None:
        super().init()
        models = self.state / "models"
        shutil.copytree(models / "smollm2", models / MODEL)
        path = models / MODEL / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": CHATML_WITH_TOOLS}))
        config = self.state / "config.toml"
        config.write_text(
            f'{config.read_text()}\n[models.{MODEL}]\ntokenizer = "models/{MODEL}"\nmax_model_len = {MAX_MODEL_LEN}\n'
            'model_revision = "sha256:of-the-same-weights"\nprofile = "instant"\ntool_parser = "hermes"\n'
            f'[models.{MODEL}.adapters.french]\nrevision = "sha256:f"\n'
            f'[models.{MODEL}.adapters.legal]\nrevision = "sha256:l"\nengine_name = "lora-legal"\n'
            # What tests find must be what they have asked for.
            "[placement]\nrewarm_share = 0.0\ncopies_max = 0\n"
        )

    def start(self) -> None:
        self.init()
        super().start()

    @property
    def engine_url(self) -> str:
        return self.file.engines[WORKER].url

    def of_engine(self, name: str) -> float:
        return self.engine_metric(WORKER, name)

    def of_bridge(self, name: str, **labels: str) -> float:
        return self.total("worker_bridge", f"prefixbus_bridge_{name}", **labels)

    def story(self) -> Story:
        return read(self.file.engines[WORKER].replay)

    async def in_step(self, deadline_s: float = DEADLINE_S) -> Story:
        """Returns when bridge and directory know of every block that the engine says it holds, and of no other."""
        last: dict[str, Any] = {}

        def agree() -> bool:
            story = self.story()
            held, foreign = self.of_bridge("held_blocks"), self.of_bridge("foreign_blocks")
            listed = self.total("directory", "prefixbus_directory_entries")
            last.update(story=story, held=held, foreign=foreign, listed=listed)
            return held + foreign == len(story.copies) and listed == held

        async def asked() -> bool:
            try:
                return await asyncio.to_thread(agree)
            except OSError as exc:
                last.update(failure=exc)
                return False

        try:
            await eventually(asked, "", deadline_s)
        except AssertionError:
            raise AssertionError(f"not in step after {deadline_s} s: {last}") from None
        assert self.of_bridge("story_complete") == 1
        found: Story = last["story"]
        return found


async def answered(
    client: Client, operator: Bus, body: dict[str, Any], *, model: str = MODEL, **options: Any
) -> tuple[Answer, Outcome]:
    """The answer with its outcome."""
    label = secrets.token_hex(8)
    answer = await ask(client, body, model=model, request_id=label, **options)
    return answer, await outcome_of(operator, label, DEADLINE_S)


def reusable(prompt_tokens: int) -> int:
    """All full blocks, but at least one token is always computed."""
    return (prompt_tokens - 1) // BLOCK * BLOCK
