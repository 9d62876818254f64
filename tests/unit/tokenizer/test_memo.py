"""Nobody sees, or pushes out, what another tenant's or scope's requests left in the memo."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixbus.tokenizer import memo
from prefixbus.tokenizer.memo import ENTRY_OVERHEAD_BYTES, Memo

SECRET = b"s" * 32
COST = 40 + ENTRY_OVERHEAD_BYTES
IDS = bytes(40)

names = st.text(min_size=0, max_size=6)


def make(tenant_entries: int = 4, total_entries: int = 8) -> Memo:
    return Memo(tenant_bytes=tenant_entries * COST, total_bytes=total_entries * COST, idle_s=10)


@given(names, names, names, names, st.text(max_size=20))
def test_no_two_scopes_or_revisions_share_a_key(
    revision: str, scope: str, other_revision: str, other_scope: str, text: str
) -> None:
    key = memo.text_key(memo.scope_key(SECRET, revision, scope), text)
    other = memo.text_key(memo.scope_key(SECRET, other_revision, other_scope), text)

    assert (key == other) == ((revision, scope) == (other_revision, other_scope))


def test_a_key_tells_nothing_without_the_secret() -> None:
    with_one = memo.text_key(memo.scope_key(SECRET, "r", "s"), "text")

    assert with_one != memo.text_key(memo.scope_key(b"t" * 32, "r", "s"), "text")
    assert len(with_one) == memo.KEY_BYTES


def test_no_tenant_sees_anothers_entry_even_under_its_key() -> None:
    store = make()
    store.put("a", b"k", IDS, 0)

    assert store.get("a", b"k", 0) == IDS
    assert store.get("b", b"k", 0) is None


def test_the_least_recently_used_entry_of_the_tenant_goes_first() -> None:
    store = make(tenant_entries=2)
    store.put("a", b"1", IDS, 0)
    store.put("a", b"2", IDS, 0)
    store.get("a", b"1", 0)

    store.put("a", b"3", IDS, 0)

    assert [store.get("a", key, 0) is not None for key in (b"1", b"2", b"3")] == [True, False, True]


def test_a_full_memo_takes_nothing_from_others() -> None:
    store = make(tenant_entries=4, total_entries=4)
    for key in (b"1", b"2", b"3"):
        store.put("a", key, IDS, 0)
    store.put("b", b"1", IDS, 0)

    assert store.put("b", b"2", IDS, 0)  # in place of its own
    assert not store.put("c", b"1", IDS, 0)  # has none to give up
    assert [store.get("a", key, 0) for key in (b"1", b"2", b"3")] == [IDS] * 3
    assert store.get("b", b"1", 0) is None


def test_an_idle_tenants_share_goes_by_the_clock() -> None:
    store = make()
    store.put("a", b"1", IDS, 0)
    store.put("b", b"1", IDS, 5)

    store.expire(11)

    assert store.get("a", b"1", 11) is None
    assert store.get("b", b"1", 11) == IDS


def test_an_erased_tenant_leaves_nothing() -> None:
    store = make()
    store.put("a", b"1", IDS, 0)
    store.put("a", b"2", IDS, 0)

    assert store.forget("a") == 2
    assert (store.held_bytes, store.entries) == (0, 0)


class MemoKeepsItsBounds(RuleBasedStateMachine):
    """Whatever is put, got and forgotten: bytes are what entries cost, no bound is passed, and an answer is what this
    tenant put there last."""

    def __init__(self) -> None:
        super().__init__()
        self.store = make(tenant_entries=3, total_entries=5)
        self.put_last: dict[tuple[str, bytes], bytes] = {}
        self.now = 0.0

    tenants = st.sampled_from("abc")
    keys = st.sampled_from([b"1", b"2", b"3", b"4"])

    @rule(tenant=tenants, key=keys, size=st.integers(0, 4 * COST))
    def puts(self, tenant: str, key: bytes, size: int) -> None:
        before = {other: self.held(other) for other in "abc" if other != tenant}
        ids = bytes([len(self.put_last) % 251]) * size
        if self.store.put(tenant, key, ids, self.now):
            self.put_last[tenant, key] = ids
        assert before == {other: self.held(other) for other in "abc" if other != tenant}

    @rule(tenant=tenants, key=keys)
    def gets(self, tenant: str, key: bytes) -> None:
        assert self.store.get(tenant, key, self.now) in (None, self.put_last.get((tenant, key)))

    @rule(tenant=tenants)
    def forgets(self, tenant: str) -> None:
        self.store.forget(tenant)
        assert not self.held(tenant)

    @rule()
    def time_passes(self) -> None:
        self.now += 6
        self.store.expire(self.now)

    @invariant()
    def bytes_are_bounded(self) -> None:
        assert 0 <= self.store.held_bytes <= 5 * COST
        costs = [
            sum(len(ids) + ENTRY_OVERHEAD_BYTES for ids in share.entries.values())
            for share in self.store._shares.values()
        ]
        assert all(cost <= 3 * COST for cost in costs)
        assert sum(costs) == self.store.held_bytes

    def held(self, tenant: str) -> set[bytes]:
        share = self.store._shares.get(tenant)
        return set(share.entries) if share is not None else set()


TestMemoKeepsItsBounds = MemoKeepsItsBounds.TestCase
