"""The engine as a function of its input: which tokens each step computes, what it costs, what the cache does.

One step, as vLLM v1 schedules it: running requests first (a decode token or the next chunk of a prompt), then waiting
ones while the token budget lasts; when blocks run out the youngest running request is preempted and starts over later;
a new request is admitted only if its whole prompt fits. At least one token of a prompt is always computed. Full blocks
can be hit as soon as they are scheduled (a later request of the same step may already reuse them) and are reported
with the step.

Owns: the queues, the pool, totals, the count of wrong hits.   Must not know: text, HTTP, ZMQ, clocks, asyncio.
Units: milliseconds, tokens, blocks.   Source: facts on vLLM 0.32; vLLM v1's scheduler and block pool."""

import math
from collections import deque
from collections.abc import Callable

import msgspec

from .pool import BlockPool
from .profile import Profile
from .request import Event, Request, State


class DoesNotFit(ValueError):
    """The request can never run here: it is longer than the model's limit or than the whole KV memory."""


class Stored(msgspec.Struct, gc=False):
    """Blocks `first_block` .. of a request became findable. Tokens are read from the request when someone needs
    them."""

    request: Request
    first_block: int
    keys: list[int]
    parent: int | None


class StepResult(msgspec.Struct, gc=False):
    """What one step (or a run of decode-only steps) did. Its events happened in the order cleared, removed, stored."""

    duration_ms: float = 0.0
    steps: int = 0
    emitted: list[tuple[Request, int]] = []
    """(request, token) in order of emission; virtual sequences have no tokens and are named in `first_tokens` only."""
    first_tokens: list[Request] = []
    finished: list[Request] = []
    admitted: list[Request] = []
    preempted: list[Request] = []
    cleared: bool = False
    removed: list[int] = []
    """Keys of evicted blocks, one entry for each physical copy."""
    stored: list[Stored] = []
    prefill_tokens: int = 0
    decode_tokens: int = 0


class Totals(msgspec.Struct):
    """Counters since start. `reused + computed - lost` of a request is the length of its KV when it ends."""

    steps: int = 0
    busy_ms: float = 0.0
    prefix_queries: int = 0
    """Prompt tokens looked up in the cache (first admissions only, as vLLM counts)."""
    prefix_hits: int = 0
    wrong_hits: int = 0
    """Blocks reused that were computed from other tokens, or under another salt, adapter or revision. Must stay 0."""
    reused_tokens: int = 0
    computed_tokens: int = 0
    lost_tokens: int = 0
    """KV given up by preemptions."""
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    finished: dict[str, int] = {}


class EngineCore:
    """`num_blocks` blocks of `block_size` tokens. Call `add_request`, then `step` (or `advance`) while `has_work`."""

    def __init__(
        self,
        profile: Profile,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        pool: BlockPool | None = None,
    ) -> None:
        """`pool`: one of `num_blocks` that does more than the usual one."""
        if block_size < 1 or max_model_len < 1:
            raise ValueError(f"block_size {block_size} and max_model_len {max_model_len} must be positive")
        if profile.step_tokens < 1 or profile.max_num_seqs < 1:
            raise ValueError(f"a step of {profile.step_tokens} tokens and {profile.max_num_seqs} requests does nothing")
        self.profile = profile
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.longest = min(max_model_len, num_blocks * block_size)
        """Most tokens a sequence can reach: the model's limit or what memory holds."""
        self.pool = pool or BlockPool(num_blocks)
        self.totals = Totals()
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._cleared = False
        self._blocked: tuple[Request, int] | None = None  # the head that did not fit, and the pool's version then

    def __repr__(self) -> str:
        return f"<EngineCore {len(self.running)} running, {len(self.waiting)} waiting, {self.pool!r}>"

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add_request(self, request: Request) -> None:
        """Queue a new request.

        :raises DoesNotFit: with what the limit is."""
        prompt = request.prompt_tokens
        if prompt < 1 or request.max_tokens < 1:
            raise DoesNotFit("a request needs at least one prompt token and one token to generate")
        if prompt >= self.max_model_len:
            raise DoesNotFit(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your request has"
                f" {prompt} input tokens. Please reduce the length of the input messages."
            )
        if prompt + request.max_tokens > self.max_model_len:
            raise DoesNotFit(
                f"'max_tokens' or 'max_completion_tokens' is too large: {request.max_tokens}. This model's maximum"
                f" context length is {self.max_model_len} tokens and your request has {prompt} input tokens"
                f" ({request.max_tokens} > {self.max_model_len} - {prompt})."
            )
        if prompt + request.max_tokens > self.longest:
            raise DoesNotFit(
                f"The KV cache holds {self.longest} tokens and the request may need {prompt + request.max_tokens}."
            )
        self.waiting.append(request)

    def abort(self, request: Request, now_ms: float = 0.0, reason: str = "abort") -> bool:
        """Drop a request wherever it is; False if it had already ended. (Stop strings end requests this way, as in
        vLLM: only the front end knows text.)"""
        if request.state is State.FINISHED:
            return False
        if request.state is State.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.move(Event.ABORT)
        self._end(request, reason, now_ms)
        return True

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False (and nothing done) while requests hold blocks. With `reset_running_requests`
        they are preempted first and run again from the start of their queue. The clearing is reported by the next step
        only."""
        if reset_running_requests:
            while self.running:
                self._preempt(self.running.pop())
        if self.pool.used_count:
            return False
        self.pool.clear()
        self._cleared = True
        return True

    def step(self, now_ms: float = 0.0) -> StepResult:
        """Run one step that starts at `now_ms`. An idle engine does nothing, and reports nothing."""
        if not self.has_work:
            return StepResult()
        result = StepResult(steps=1, cleared=self._cleared)
        self._cleared = False
        budget = self.profile.step_tokens
        chunks_ms = 0.0
        decoding = context = index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            length = request.sequence.length
            tokens = min(length - request.computed, budget)
            if not self._make_room(request, tokens, result):
                break
            if request.prefilling:
                chunks_ms += self.profile.chunk_ms(tokens, request.computed + tokens)
                result.prefill_tokens += tokens
            else:
                decoding += 1
                context += length
            self._compute(request, tokens, result)
            budget -= tokens
            index += 1
        scheduled = self.running[:index]
        if not result.preempted:
            while self.waiting and budget and len(self.running) < self.profile.max_num_seqs:
                request = self.waiting[0]
                tokens = self._admit(request, budget, now_ms, result)
                if not tokens:
                    break
                chunks_ms += self.profile.chunk_ms(tokens, request.computed + tokens)
                result.prefill_tokens += tokens
                self._compute(request, tokens, result)
                budget -= tokens
                scheduled.append(request)

        result.decode_tokens = decoding
        duration_ms = self.profile.step_ms + chunks_ms + self.profile.decode_ms(decoding, context)
        if result.prefill_tokens:
            duration_ms += self.profile.prefill_step_ms
        result.duration_ms = duration_ms
        ended_ms = now_ms + duration_ms
        for request in scheduled:
            if request.computed == request.sequence.length:
                self._emit(request, ended_ms, result)
        self._close(result, ended_ms)
        return result

    def advance(self, now_ms: float, until_ms: float) -> StepResult:
        """One step, or in one go as many decode-only steps as start before `until_ms` and cannot differ from stepping.

        A run ends with the first step in which a request finishes; before that no request joins, leaves or loses
        blocks."""
        steps = self._decode_run_length(until_ms - now_ms)
        if steps < 2:
            return self.step(now_ms)
        result = StepResult(steps=steps, cleared=self._cleared)
        self._cleared = False
        running = self.running
        count = len(running)
        result.duration_ms = self._decode_run_ms(steps, count, sum(r.sequence.length for r in running))
        result.decode_tokens = steps * count
        if any(not request.sequence.virtual for request in running):
            for _ in range(steps):
                for request in running:
                    result.emitted.append((request, request.sequence.append_next(False)))
        else:
            for request in running:
                request.sequence.grow(steps)
        for _, index, is_full in self._block_borders(steps):
            request = running[index]
            if is_full:
                self._register(request, request.registered + 1, result)
            else:
                request.blocks += self.pool.allocate(1)
        ended_ms = now_ms + result.duration_ms
        for request in running:
            request.computed += steps
            request.outputs += steps
            if request.outputs >= request.max_tokens or request.sequence.length >= self.longest:
                request.finish_reason = "length"
                result.finished.append(request)
        self.totals.computed_tokens += steps * count
        self.totals.generated_tokens += steps * count
        self._close(result, ended_ms)
        return result

    def undisturbed_ms(self) -> float:
        """How long the run of decode-only steps is that `advance` would take in one go if nothing came in between; 0
        if an ordinary step is due. Changes nothing: a caller that knows no `until` waits this long, or until then."""
        steps = self._decode_run_length(math.inf)
        if steps < 2:
            return 0.0
        return self._decode_run_ms(steps, len(self.running), sum(r.sequence.length for r in self.running))

    # -- one step's parts

    def _make_room(self, request: Request, tokens: int, result: StepResult) -> bool:
        """Give a running request blocks for `tokens` more; False if it had to be preempted itself."""
        need = -(-(request.computed + tokens) // self.block_size) - len(request.blocks)
        if need <= 0:
            return True
        while need > self.pool.free_count:
            victim = self.running.pop()
            self._preempt(victim)
            result.preempted.append(victim)
            if victim is request:
                return False
        request.blocks += self.pool.allocate(need)
        return True

    def _admit(self, request: Request, budget: int, now_ms: float, result: StepResult) -> int:
        """Let the head of the queue in if its whole prompt fits; the tokens it computes this step, 0 if it must
        wait."""
        pool = self.pool
        if self._blocked == (request, pool.version):
            return 0
        sequence = request.sequence
        length = sequence.length
        # The last token is always computed: its output is needed.
        reusable = 0 if request.skips_cache else (length - 1) // self.block_size
        sequence.ensure_keys(reusable)
        hits = pool.lookup(sequence.keys, reusable)
        if -(-length // self.block_size) - len(hits) + pool.unheld(hits) > pool.free_count:
            self._blocked = (request, pool.version)
            return 0
        self.waiting.popleft()
        self.running.append(request)
        request.move(Event.ADMIT)
        pool.hold(hits)
        found = len(hits)
        if request.delivered.start <= found < request.delivered.stop:
            found = min(request.delivered.stop, reusable)
        request.delivered = range(0)
        reused = found * self.block_size
        request.computed = reused
        request.registered = len(hits)
        request.prefilling = True
        tokens = min(length - reused, budget)
        request.blocks = hits + pool.allocate(-(-(reused + tokens) // self.block_size) - len(hits))
        if found > len(hits):
            self._register(request, found, result)
        totals = self.totals
        totals.reused_tokens += reused
        totals.wrong_hits += sum(1 for b, o in zip(hits, sequence.origins, strict=False) if pool.origin(b) != o)
        if request.cached_tokens is None:
            request.cached_tokens = reused
            request.scheduled_ms = now_ms
            totals.prefix_queries += length
            totals.prefix_hits += reused
        result.admitted.append(request)
        return tokens

    def _compute(self, request: Request, tokens: int, result: StepResult) -> None:
        request.computed += tokens
        self.totals.computed_tokens += tokens
        full = request.computed // self.block_size
        if full > request.registered:
            self._register(request, full, result)

    def _register(self, request: Request, full: int, result: StepResult) -> None:
        """Make the request's blocks up to `full` findable."""
        first = request.registered
        sequence = request.sequence
        sequence.ensure_keys(full)
        keys = sequence.keys
        for index in range(first, full):
            self.pool.register(request.blocks[index], keys[index], sequence.origins[index])
        request.registered = full
        result.stored.append(Stored(request, first, keys[first:full], keys[first - 1] if first else None))

    def _emit(self, request: Request, ended_ms: float, result: StepResult) -> None:
        sequence = request.sequence
        may_end = not request.ignore_eos and request.outputs >= request.min_tokens
        before = sequence.length
        token = sequence.append_next(may_end)
        request.outputs += 1
        request.prefilling = False
        self.totals.generated_tokens += 1
        if request.first_token_ms is None:
            request.first_token_ms = ended_ms
            result.first_tokens.append(request)
            self.totals.prompt_tokens += request.prompt_tokens
            self.totals.prompt_tokens_cached += request.cached_tokens or 0
        if not sequence.virtual:
            result.emitted.append((request, token))
            if may_end and token == sequence.eos:
                request.finish_reason = "stop"
                result.finished.append(request)
                return
        if request.outputs >= request.max_tokens or before + 1 >= self.longest:
            request.finish_reason = "length"
            result.finished.append(request)

    def _preempt(self, request: Request) -> None:
        """Take a request that was just popped off `running` back to the head of the queue, without its KV."""
        request.move(Event.PREEMPT)
        self.pool.release(request.blocks)
        self.totals.lost_tokens += request.computed
        self.totals.preemptions += 1
        request.blocks = []
        request.registered = request.computed = 0
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _close(self, result: StepResult, ended_ms: float) -> None:
        """Settle a step: who ended leaves, evictions are taken over from the pool."""
        if result.finished:
            for request in result.finished:
                request.move(Event.FINISH)
                self._end(request, request.finish_reason or "length", ended_ms)
            self.running = [request for request in self.running if request.state is State.RUNNING]
        if self.pool.removed:
            result.removed = self.pool.removed
            self.pool.removed = []
            self.totals.evictions += len(result.removed)
        self.totals.steps += result.steps
        self.totals.busy_ms += result.duration_ms

    def _end(self, request: Request, reason: str, now_ms: float) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.finish_reason = reason
        request.finished_ms = now_ms
        self.totals.finished[reason] = self.totals.finished.get(reason, 0) + 1

    # -- runs of decode-only steps

    def _decode_run_length(self, time_ms: float) -> int:
        """How many steps `advance` may take at once; below 2 means that an ordinary step is due."""
        running = self.running
        count = len(running)
        if not count or count >= self.profile.step_tokens:
            return 0
        steps = 1 << 30
        for request in running:
            length = request.sequence.length
            if request.prefilling or not request.ignore_eos or request.computed != length - 1:
                return 0
            steps = min(steps, request.max_tokens - request.outputs, self.longest - length)
        if self.waiting and count < self.profile.max_num_seqs:
            if self._blocked != (self.waiting[0], self.pool.version):
                return 0
            # A block that becomes findable may let the blocked head in: look again with the step that fills one.
            steps = min(steps, *(self.block_size - 1 - r.computed % self.block_size for r in running))
        steps = _largest(steps, lambda k: self._blocks_needed(k) <= self.pool.free_count)
        context = sum(r.sequence.length for r in running)
        return _largest(steps, lambda k: self._decode_run_ms(k - 1, count, context) < time_ms)

    def _blocks_needed(self, steps: int) -> int:
        size = self.block_size
        return sum(-(-(r.computed + steps) // size) - len(r.blocks) for r in self.running)

    def _decode_run_ms(self, steps: int, count: int, context: int) -> float:
        """`steps` decode steps of `count` sequences, `context` tokens long in all before the first of them."""
        first = self.profile.step_ms + self.profile.decode_ms(count, context)
        growth = self.profile.decode_context_token_ms * count
        return steps * first + growth * (steps * (steps - 1) // 2)

    def _block_borders(self, steps: int) -> list[tuple[int, int, bool]]:
        """(step, place in `running`, is the block full) wherever the next `steps` decode tokens open or fill a
        block."""
        size = self.block_size
        borders = []
        for index, request in enumerate(self.running):
            into = request.computed % size
            borders += [(step, index, False) for step in range(-into % size, steps, size)]
            borders += [(step, index, True) for step in range(size - 1 - into, steps, size)]
        borders.sort()
        return borders


def _largest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number in 0..limit for which a condition that only ever turns from true to false still holds."""
    if limit <= 0 or holds(limit):
        return max(limit, 0)
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
