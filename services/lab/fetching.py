"""KV that comes to a worker from elsewhere in virtual time: from its own host store, and from other workers.

The model. What a request will find beyond its GPU hits is fetched from the moment its bridge accepts it, while others
are computed; it goes to the engine when its turn has come and all of it is there. Until then it takes no GPU memory:
it is staged outside. In the engine it is new KV, which evicts as much (engine_sim's `delivered`). If GPU hits have
meanwhile shrunk below where it begins, it is of no use.

An engine always loads what its host store has. What a router says is to be pulled goes on from there: the source is
asked one hop later and gives what it has by then, in GPU or host memory; the rest is computed. Loads of a worker share
its host link, and pulls the links of both workers in each direction, one transfer after the other. Writing blocks
through to the host store costs nothing.

Owns: a worker's links, its host store.   Must not know: why something is pulled, the engine's steps.
Units: seconds, blocks, bytes."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..engine_sim.profile import PRESETS
from ..router.transfer import SETUP_MS
from .host import HostStore
from .setup import Setup


class Clock(Protocol):
    @property
    def now(self) -> float: ...

    def at(self, when: float, call: Callable[..., None], *args: object) -> None: ...


class Line:
    """One direction of a link: a transfer begins when those before it are over."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0


Reply = Callable[[int, Line], None]
"""A source gives so many blocks, over its line out."""


class Ask(Protocol):
    """Asks another worker for the blocks of `keys` from `first` to before `upto`."""

    def __call__(self, source: str, keys: Sequence[int], first: int, upto: int, reply: Reply) -> None: ...


class Fetch:
    """Blocks `first` .. of a prompt, first those that are loaded, then those that are pulled."""

    __slots__ = ("began_at", "ended_at", "first", "loaded_blocks", "loaded_by", "pulled_blocks")

    def __init__(self, first: int, began_at: float) -> None:
        self.first = first
        self.began_at = began_at
        self.loaded_blocks = 0
        self.loaded_by = began_at
        self.pulled_blocks = 0
        self.ended_at: float | None = None

    @property
    def upto(self) -> int:
        return self.first + self.loaded_blocks + self.pulled_blocks


class Fetching:
    """One worker's. `ask` brings a question to another one."""

    def __init__(self, clock: Clock, ask: Ask, setup: Setup, block_size: int) -> None:
        self.host = HostStore(setup.host_tokens // block_size)
        self._clock = clock
        self._ask = ask
        block_bytes = block_size * PRESETS[setup.profile].kv_token_bytes
        self._load_s = block_bytes / setup.host_bandwidth
        self._pull_s = block_bytes / setup.transfer_bandwidth if setup.transfer_bandwidth else 0.0
        self._loads = Line()
        self._out = Line()
        self._into = Line()

    def __repr__(self) -> str:
        return f"<Fetching {self.host!r}>"

    def begin(
        self, keys: Sequence[int], held: int, limit: int, source: str, upto: int, on_end: Callable[[], None]
    ) -> Fetch | None:
        """What the host store has beyond the `held` blocks of `keys[:limit]`, and if there is a `source` what that has
        up to block `upto`. None, and no `on_end`, if there is nothing to wait for."""
        clock = self._clock
        fetch = Fetch(held, clock.now)
        fetch.loaded_blocks = self.host.depth(keys, held, limit) - held
        if fetch.loaded_blocks:
            fetch.loaded_by = self._loads.free_at = (
                max(clock.now, self._loads.free_at) + fetch.loaded_blocks * self._load_s
            )
        first, upto = fetch.upto, min(upto, limit)
        if source and first < upto:

            def given(blocks: int, out: Line) -> None:
                self._pull(fetch, blocks, out, on_end)

            self._ask(source, keys, first, upto, given)
        elif fetch.loaded_blocks:
            clock.at(fetch.loaded_by, self._end, fetch, on_end)
        else:
            return None
        return fetch

    def give(self, held: int, keys: Sequence[int], first: int, upto: int, reply: Reply) -> None:
        """Another worker asks; `held` blocks of `keys` are in the GPU."""
        there = self.host.depth(keys, max(first, min(held, upto)), upto)
        reply(there - first, self._out)

    def _pull(self, fetch: Fetch, blocks: int, out: Line, on_end: Callable[[], None]) -> None:
        now = self._clock.now
        ends_at = max(now, fetch.loaded_by)
        if blocks:
            fetch.pulled_blocks = blocks
            begins_at = max(now, out.free_at, self._into.free_at)
            out.free_at = self._into.free_at = begins_at + blocks * self._pull_s
            ends_at = max(ends_at, self._into.free_at + SETUP_MS / 1000)
        self._clock.at(ends_at, self._end, fetch, on_end)

    def _end(self, fetch: Fetch, on_end: Callable[[], None]) -> None:
        fetch.ended_at = self._clock.now
        on_end()
