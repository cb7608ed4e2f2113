"""Selections that are remembered: found by partition and id, bounded in age, number and bytes."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lean_selector.core.selection.bookings import SelectionCache
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import SelectionCacheSettings
from lean_selector.core.selection.shapes import CachedSelection

KEY, OTHER = ("m", "g"), ("m", "h")


def cache(ttl_s: float = 10.0, entries: int = 100, size: int = 10_000) -> SelectionCache:
    return SelectionCache(SelectionCacheSettings(ttl_s=ttl_s, max_entries=entries, max_bytes=size))


def selection(blocks: int = 0, worker_id: int = 1, *, local: bytes = b"") -> CachedSelection:
    prompt = Prompt(4 * blocks, local, blocks, bytes(8), bytes(8 * blocks))
    return CachedSelection(worker_id, 0, prompt, 4 * blocks, None, True)


def test_what_was_selected_is_found_under_its_partition_and_id_and_stays() -> None:
    kept = cache()
    kept.put(KEY, "a", selection(worker_id=1), 0.0)
    kept.put(OTHER, "a", selection(worker_id=2), 0.0)
    for _ in range(2):
        found = kept.get(KEY, "a", 1.0)
        assert found is not None
        assert found.worker_id == 1
    assert kept.get(KEY, "b", 1.0) is None


def test_looking_renews_nothing() -> None:
    kept = cache(ttl_s=10.0)
    kept.put(KEY, "a", selection(), 0.0)
    assert kept.get(KEY, "a", 9.0) is not None
    assert kept.get(KEY, "a", 10.0) is None
    assert (len(kept), kept.size_bytes, kept.expired) == (0, 0, 1)


def test_an_entry_counts_its_hashes_and_the_bytes_of_its_names() -> None:
    kept = cache()
    kept.put(("möd", "g"), "id", selection(3, local=bytes(24)), 0.0)
    assert kept.size_bytes == 3 * 8 + 24 + len("möd".encode()) + 1 + 2


def test_what_was_booked_is_used_up() -> None:
    kept = cache()
    kept.put(KEY, "a", selection(), 0.0)
    kept.use_up(KEY, "a")
    assert kept.get(KEY, "a", 0.0) is None
    assert (kept.used, kept.size_bytes) == (1, 0)


class AgainstAList(RuleBasedStateMachine):
    """Against a list that is looked through each time."""

    @initialize(
        ttl_s=st.sampled_from([0.0, 3.0, 100.0]),
        entries=st.integers(0, 4),
        size=st.sampled_from([0, 40, 1000]),
    )
    def begin(self, ttl_s: float, entries: int, size: int) -> None:
        self.limits = ttl_s, entries, size
        self.kept = cache(*self.limits)
        self.model: list[
            tuple[str, int, float, int]
        ] = []  # id, blocks, expiry, bytes; oldest first
        self.now, self.evicted = 0.0, 0

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from("abcde"), blocks=st.integers(0, 6))
    def put(self, name: str, blocks: int) -> None:
        self.kept.put(KEY, name, selection(blocks), self.now)
        ttl_s, entries, size = self.limits
        if not entries or not size:
            return
        self.model = [each for each in self.model if each[0] != name and each[2] > self.now]
        self.model.append((name, blocks, self.now + ttl_s, 8 * blocks + 3))
        while len(self.model) > entries or sum(each[3] for each in self.model) > size:
            del self.model[0]
            self.evicted += 1

    @rule(name=st.sampled_from("abcde"))
    def get(self, name: str) -> None:
        found = self.kept.get(KEY, name, self.now)
        self.model = [each for each in self.model if each[2] > self.now]
        known = [blocks for each, blocks, _, _ in self.model if each == name]
        assert (found is None) == (not known)
        assert found is None or found.prompt.sequence_count == known[0]

    @rule(name=st.sampled_from("abcde"))
    def drop(self, name: str) -> None:
        self.kept.drop(KEY, name)
        self.model = [each for each in self.model if each[0] != name]

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        if hasattr(self, "model"):
            self.kept.expire(self.now)
            self.model = [each for each in self.model if each[2] > self.now]
            assert len(self.kept) == len(self.model)
            assert self.kept.size_bytes == sum(each[3] for each in self.model)
            assert self.kept.evicted == self.evicted


TestAgainstAList = AgainstAList.TestCase
