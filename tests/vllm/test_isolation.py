"""What shares no KV, by the counters of a real engine."""

import secrets
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from support.cluster import chat
from support.vllm import BLOCK, VllmEngine
from support.vllm import MODEL as SERVED

from prefixbus.bus import config as config_module
from prefixbus.bus import identity, namespace, secretfile
from prefixbus.bus.connection import Bus
from prefixbus.bus.errors import WorkerRefused
from prefixbus.bus.namespace import Namespace
from prefixbus.client import Client
from prefixbus.cluster import state
from prefixbus.worker_bridge.adapters import Adapters
from prefixbus.worker_bridge.engine import Generation, VllmHttp
from prefixbus.worker_bridge.handshake import examine

from .narrow import HITS, MODEL, TEST_TIMEOUT_S, Narrow, answered, reusable

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)


async def test_the_same_prompt_of_two_tenants_and_two_scopes(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus
) -> None:
    stranger = state.add_tenant(narrow.state, f"t{secrets.token_hex(4)}")
    body = chat(f"{secrets.token_hex(8)} the same document " * 20, max_tokens=2)
    hits = narrow.of_engine(HITS)
    async with (
        await narrow.client(tenant=stranger.tenant, token=stranger.token) as other,
        await narrow.client(scope="team-legal") as legal,
        await narrow.client(scope="team-sales") as sales,
    ):
        callers = (narrow_client, other, legal, sales)
        first = [(await answered(caller, narrow_operator, body))[0] for caller in callers]
        across = narrow.of_engine(HITS) - hits
        await narrow.in_step()
        again = [await answered(caller, narrow_operator, body) for caller in callers]

    whole = reusable(first[0].usage["prompt_tokens"])
    assert [answer.cached_tokens for answer in first] == [0, 0, 0, 0]
    assert across == 0
    assert [answer.cached_tokens for answer, _ in again] == [whole] * 4
    assert [outcome.predicted_tokens for _, outcome in again] == [whole] * 4
    assert narrow.of_engine(HITS) - hits == 4 * whole
    assert narrow.total("worker_bridge", "prefixbus_wrong_hits_total") == 0


async def found(narrow: Narrow, spaces: Sequence[Namespace], engine_names: dict[str, str]) -> list[int | None]:
    """Cached tokens of one prompt of four blocks in each namespace, and in each again: salted as the bridge does it,
    and sent to the engine directly."""
    key = secretfile.purpose_key(narrow.state, "namespace")
    adapters = Adapters(secretfile.purpose_key(narrow.state, "salt"), engine_names)
    tokens = array("I", (1000 + secrets.randbelow(40000) for _ in range(4 * BLOCK + 1))).tobytes()
    engine = VllmHttp(narrow.engine_url, MODEL)

    async def cached(space: Namespace) -> int | None:
        salt = adapters.salt(space, namespace.ns_id(key, space))
        model = engine_names.get(space.adapter, "")
        asked = Generation(secrets.token_hex(8), tokens, {"max_tokens": 1}, salt, model=model)
        usage = None
        async with engine.generate(asked) as progress:
            async for step in progress:
                usage = step.usage or usage
        assert usage is not None
        return usage.cached_tokens

    try:
        return [await cached(space) for space in (*spaces, *spaces)]
    finally:
        await engine.close()


async def test_the_same_prompt_in_two_epochs(narrow: Narrow) -> None:
    """Nothing grants a second epoch yet, so no request through the bridge could be in one."""
    config = config_module.load(narrow.state / "config.toml", {})
    served = identity.of_model(MODEL, config.models[MODEL])
    hits = narrow.of_engine(HITS)

    cached = await found(
        narrow, [served.namespace("demo", "", acl_epoch=secrets.token_bytes(16)) for _ in range(2)], {}
    )

    assert cached == [0, 0, 4 * BLOCK, 4 * BLOCK]
    assert narrow.of_engine(HITS) - hits == 8 * BLOCK


async def test_the_same_prompt_for_two_revisions_of_an_adapter(narrow: Narrow) -> None:
    """Which the engine has under one name: its events would not tell them apart."""
    section = config_module.load(narrow.state / "config.toml", {}).models[MODEL]
    hits = narrow.of_engine(HITS)
    revised = {**section.adapters, "french": msgspec.structs.replace(section.adapters["french"], revision="sha256:f2")}
    served = [identity.of_model(MODEL, one) for one in (section, msgspec.structs.replace(section, adapters=revised))]

    cached = await found(
        narrow, [one.namespace("demo", "", adapter="french") for one in served], section.engine_names()
    )

    assert cached == [0, 0, 4 * BLOCK, 4 * BLOCK]
    assert narrow.of_engine(HITS) - hits == 8 * BLOCK


async def test_the_same_prompt_for_a_model_and_its_adapters(
    narrow: Narrow, narrow_client: Client, narrow_operator: Bus
) -> None:
    body = chat(f"{secrets.token_hex(8)} the same question " * 20, max_tokens=8)
    names = (MODEL, f"{MODEL}:french", f"{MODEL}:legal")
    hits = narrow.of_engine(HITS)

    first = [(await answered(narrow_client, narrow_operator, body, model=name))[0] for name in names]
    across = narrow.of_engine(HITS) - hits
    await narrow.in_step()
    again = [await answered(narrow_client, narrow_operator, body, model=name) for name in names]

    whole = reusable(first[0].usage["prompt_tokens"])
    assert len({answer.text for answer in first}) == 3, "each adapter says something else"
    assert [answer.cached_tokens for answer in first] == [0, 0, 0]
    assert across == 0
    assert [answer.cached_tokens for answer, _ in again] == [whole] * 3
    assert [outcome.predicted_tokens for _, outcome in again] == [whole] * 3
    assert narrow.total("worker_bridge", "prefixbus_wrong_hits_total") == 0


@pytest.fixture
def leaking(tmp_path: Path) -> Iterator[VllmEngine]:
    """With vLLM's own example of a KV connector, which names what it keeps by tokens alone."""
    connector = (
        '{"kv_connector":"ExampleConnector","kv_role":"kv_both",'
        f'"kv_connector_extra_config":{{"shared_storage_path":"{tmp_path}/kv"}}}}'
    )
    with VllmEngine(tmp_path, "--kv-transfer-config", connector, kv_blocks=130) as engine:
        yield engine


async def test_an_engine_whose_connector_forgets_salts_is_refused(leaking: VllmEngine) -> None:
    engine = VllmHttp(leaking.url, SERVED)
    try:
        with pytest.raises(WorkerRefused, match="in a tier beyond its own memory"):
            await examine(engine, model=SERVED, block_size=BLOCK, one_time_salt=lambda: secrets.token_hex(16))
    finally:
        await engine.close()
