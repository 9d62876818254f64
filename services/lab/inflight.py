"""What a router that sees requests go and answers come knows of its workers, without any report of theirs.

For the rules it is compared with (rules.py): published routers keep such books. A request counts until its end, its
uncached tokens until its first token, and a block that several requests of a worker use counts once.

Owns: the books.   Must not know: rules, prices, the engine.   Units: tokens, seconds; keys u64 LE (8 bytes each)."""

from collections import Counter, deque


class _Sent:
    __slots__ = ("blocks", "keys", "prefill_tokens", "worker")

    def __init__(self, worker: str, keys: list[int], blocks: int, prefill_tokens: int) -> None:
        self.worker = worker
        self.keys = keys
        self.blocks = blocks
        self.prefill_tokens = prefill_tokens


class _Worker:
    __slots__ = ("active", "active_blocks", "history", "history_ms", "placed_tokens", "prefill_tokens", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prefill_tokens = 0
        self.active: Counter[int] = Counter()
        self.active_blocks = 0
        self.placed_tokens = 0
        self.history: deque[tuple[float, float]] = deque()
        self.history_ms = 0.0


class InFlight:
    """`window_s`: how far back `recent_ms` looks."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._sent: dict[str, _Sent] = {}
        self._workers: dict[str, _Worker] = {}

    def __repr__(self) -> str:
        return f"<InFlight {len(self._sent)} requests on {len(self._workers)} workers>"

    def sent(
        self, request_id: str, worker: str, keys: list[int], prompt_tokens: int, uncached_tokens: int,
        block_size: int, compute_ms: float, now: float,
    ) -> None:  # fmt: skip
        """A request went to this worker; a request that goes elsewhere is taken back first."""
        blocks = -(-prompt_tokens // block_size)
        self._sent[request_id] = _Sent(worker, keys, blocks, uncached_tokens)
        books = self._of(worker)
        books.requests += 1
        books.prefill_tokens += uncached_tokens
        books.placed_tokens += uncached_tokens
        books.active_blocks += blocks - len(keys)
        for key in keys:
            books.active[key] += 1
            if books.active[key] == 1:
                books.active_blocks += 1
        books.history.append((now, compute_ms))
        books.history_ms += compute_ms

    def first_token(self, request_id: str) -> None:
        sent = self._sent.get(request_id)
        if sent is not None:
            self._of(sent.worker).prefill_tokens -= sent.prefill_tokens
            sent.prefill_tokens = 0

    def ended(self, request_id: str) -> None:
        self.first_token(request_id)
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        books = self._of(sent.worker)
        books.requests -= 1
        books.active_blocks -= sent.blocks - len(sent.keys)
        for key in sent.keys:
            books.active[key] -= 1
            if not books.active[key]:
                del books.active[key]
                books.active_blocks -= 1

    def requests(self, worker: str) -> int:
        return self._of(worker).requests

    def prefill_tokens(self, worker: str) -> int:
        """Sent there, and not computed yet."""
        return self._of(worker).prefill_tokens

    def blocks_with(self, worker: str, keys: list[int], prompt_tokens: int, block_size: int) -> int:
        """Blocks in use there, were this prompt one of them."""
        books = self._of(worker)
        # A chain: who uses a block uses all before it.
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in books.active:
                low = middle
            else:
                high = middle - 1
        return books.active_blocks - low - (prompt_tokens // -block_size)

    def placed_tokens(self, worker: str) -> int:
        """Uncached tokens sent there since the start."""
        return self._of(worker).placed_tokens

    def recent_ms(self, worker: str, now: float) -> float:
        """Engine time of the requests sent there within the window."""
        books = self._of(worker)
        while books.history and books.history[0][0] < now - self._window_s:
            books.history_ms -= books.history.popleft()[1]
        return max(0.0, books.history_ms)

    def _of(self, worker: str) -> _Worker:
        books = self._workers.get(worker)
        if books is None:
            books = self._workers[worker] = _Worker()
        return books
