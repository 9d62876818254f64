# ruff: noqa: TID251 - a command: it asks an engine and waits
"""`prefixbus calibrate`: short probes of an engine, and what they tell written where routers begin from it.

Times are the engine's own (its histograms of prefill and decode), so neither the way to it nor this process counts.
Every prompt has a salt that is used once: nobody's cache is read, and what the probes leave is found by nobody.

Owns: the command, one probe's course.   Must not know: what the numbers mean (calibration.py)."""

import array
import asyncio
import itertools
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import DEFAULT_STATE, State

if TYPE_CHECKING:
    from ..worker_bridge.engine import VllmHttp
    from .calibration import Measured, Probe, Sample

# Heavy modules are imported by the commands that need them, as in cli.py.

commands = typer.Typer()

# Token ids that every vocabulary has.
_FIRST_ID, _IDS = 5, 90
# An engine logs a request a moment after it has answered it.
_LOGGED_WITHIN_S = 5.0
_POLL_S = 0.01
_PREFILL = "vllm:request_prefill_time_seconds"
_DECODE = "vllm:request_decode_time_seconds"


@commands.command()
def calibrate(
    engine_url: Annotated[str, typer.Option(help="The engine's HTTP address.")],
    model: Annotated[str, typer.Option(help="The model that it serves, from config.toml.")] = "smollm2",
    engine_key_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with the key that the engine asks for.")
    ] = None,
    state: State = DEFAULT_STATE,
    most_tokens: Annotated[
        int, typer.Option(min=64, max=131_072, help="Longest prompt; about 7 times as many are computed in all.")
    ] = 4096,
    while_busy: Annotated[
        bool, typer.Option("--while-busy", help="Ask it though others use it; what they disturbed is asked again.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what was measured, and write nothing.")] = False,
) -> None:
    """Measure an engine, and let routers begin with what it takes."""
    from ..bus import config as config_module
    from ..bus import secretfile
    from ..bus.errors import ConfigInvalid
    from . import calibration, deployment
    from .state import write_atomically

    deployment.require(state)
    path = state / "config.toml"
    config = config_module.load(path, os.environ)
    section = config.models.get(model)
    if section is None:
        raise ConfigInvalid(
            f"{model} is not in {path} (it has {', '.join(sorted(config.models)) or 'none'}).", field="--model"
        )
    longest = min(most_tokens, section.max_model_len)
    key = secretfile.read(engine_key_file).decode() if engine_key_file else ""
    measured = asyncio.run(_measured(engine_url, key, model, section.block_size, longest, while_busy))
    typer.echo(f"{model}: {calibration.sentence(measured)}", err=True)
    if dry_run:
        return
    text = calibration.written_into(path.read_text("utf-8"), model, measured)
    # Nothing that could not be read again takes the file's place.
    config_module.parse(text, {})
    write_atomically(path, text.encode())
    typer.echo(f"written to {path}: routers and bridges begin with it when they are started again", err=True)


async def _measured(
    engine_url: str, key: str, model: str, block_size: int, most_tokens: int, while_busy: bool
) -> "Measured":
    """:raises PrefixbusError: the engine cannot be measured; the sentence says why."""
    from ..bus.errors import WorkerLost, WorkerRefused
    from ..worker_bridge.engine import VllmHttp
    from . import calibration

    engine = VllmHttp(engine_url, model, key)
    try:
        served = {each.id: each for each in await engine.served_models()}
        if model not in served:
            raise WorkerRefused(
                f"The engine serves {', '.join(sorted(served)) or 'nothing'}, not {model}.",
                remedy="Name the model with --model, or correct the address.",
            )
        course = _Course(engine, while_busy)
        theirs, kv_blocks = await course.look()
        if theirs != block_size:
            raise WorkerRefused(
                f"The engine's blocks have {theirs or 'an unknown number of'} tokens, the config says {block_size}.",
                remedy="Start it with --block-size, or correct block_size.",
            )
        longest = served[model].max_model_len or most_tokens
        samples = [await course.take(probe) for probe in calibration.plan(block_size, longest, most_tokens)]
        return calibration.fit(samples, block_size=block_size, kv_tokens=kv_blocks * block_size)
    except TimeoutError as exc:
        raise WorkerLost(str(exc)) from exc
    finally:
        await engine.close()


class _Course:
    """The probes of one engine, one after the other."""

    def __init__(self, engine: "VllmHttp", while_busy: bool) -> None:
        self._engine = engine
        self._tries = 5 if while_busy else 1
        self._salt = ""
        self._numbers = itertools.count()

    async def look(self) -> tuple[int, int]:
        """The size of its blocks in tokens, and how many there are; 0 for what it does not say.

        :raises Unavailable: it is busy, and may not be asked then."""
        from ..bus.errors import EngineFailed, Unavailable

        numbers = await self._engine.numbers()
        if f"{_PREFILL}_count" not in numbers.sums and f"{_PREFILL}_sum" not in numbers.sums:
            raise EngineFailed(f"The engine does not tell {_PREFILL} in its metrics.", remedy="Is it a vLLM server?")
        busy = sum(numbers.sums.get(f"vllm:num_requests_{state}", 0.0) for state in ("running", "waiting"))
        if busy and self._tries == 1:
            raise Unavailable(
                f"The engine is busy with {busy:.0f} request{'s' if busy > 1 else ''}.",
                remedy="Try when it is idle, or give --while-busy.",
            )
        return numbers.block_size, numbers.blocks

    async def take(self, probe: "Probe") -> "Sample":
        """:raises Unavailable: others used the engine meanwhile, each time."""
        from ..bus.errors import Unavailable

        for _ in range(self._tries):
            sample = await self._try(probe)
            if sample is not None:
                return sample
        raise Unavailable(
            "Others used the engine while it was measured.", remedy="Try when it is idle, or give --while-busy."
        )

    async def _try(self, probe: "Probe") -> "Sample | None":
        from ..bus.errors import WorkerRefused
        from .calibration import Sample

        if not probe.after:
            self._salt = secrets.token_hex(16)
        before = (await self._engine.numbers()).sums
        cached = await self._ask(probe)
        if cached is None:
            raise WorkerRefused(
                "The engine does not report cached tokens.", remedy="Start it with --enable-prompt-tokens-details."
            )
        if cached > probe.after:
            raise WorkerRefused("The engine reuses blocks across salts: tenants would share its cache.")
        spent = await self._spent_since(before)
        if spent is None:
            return None
        prefill_s, decode_s = spent
        steps = probe.answer_tokens - 1
        step_ms = 1000 * decode_s / steps if steps else 0.0
        return Sample(probe.prompt_tokens, probe.prompt_tokens - cached, 1000 * prefill_s, step_ms)

    async def _spent_since(self, before: dict[str, float]) -> tuple[float, float] | None:
        """Seconds of prefill and decode, once the request is logged; None if there were others."""
        give_up_at = asyncio.get_running_loop().time() + _LOGGED_WITHIN_S
        while True:
            now = (await self._engine.numbers()).sums

            def since(name: str, now: dict[str, float] = now) -> float:
                return now.get(name, 0.0) - before.get(name, 0.0)

            count = since(f"{_PREFILL}_count")
            if count == 1 and since(f"{_DECODE}_count") == 1:
                return since(f"{_PREFILL}_sum"), since(f"{_DECODE}_sum")
            if count > 1 or asyncio.get_running_loop().time() > give_up_at:
                return None
            await asyncio.sleep(_POLL_S)

    async def _ask(self, probe: "Probe") -> int | None:
        """How much came from cache; None if the engine does not say."""
        from ..worker_bridge.engine import Generation

        number = next(self._numbers)
        ids = array.array("I", (_FIRST_ID + position % _IDS for position in range(probe.prompt_tokens)))
        if probe.after:
            # Another continuation each time: what an earlier one left must not be found.
            ids[probe.after] = _FIRST_ID + _IDS + number % 10
        request = Generation(
            engine_request_id=f"calibrate-{self._salt[:16]}-{number}",
            tokens=ids.tobytes(),
            params={"max_tokens": probe.answer_tokens, "temperature": 0.0, "ignore_eos": True},
            salt=self._salt,
        )
        cached: int | None = None
        async with self._engine.generate(request) as progress:
            async for step in progress:
                if step.usage is not None:
                    cached = step.usage.cached_tokens
        return cached
