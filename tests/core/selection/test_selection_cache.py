"""Selections that are remembered: found by partition and id, bounded in age, number and bytes."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import SelectionCacheSettings
from lean_selector.core.selection.selection_cache import SelectionCache
from lean_selector.core.selection.shapes import CachedSelection

KEY, OTHER = ("m", "g"), ("m", "h")
Place = tuple[tuple[str, str], str]
places = st.tuples(st.sampled_from([KEY, OTHER]), st.sampled_from("abc"))


def cache(ttl_s: float = 10.0, entries: int = 100, size: int = 10_000) -> SelectionCache:
    return SelectionCache(SelectionCacheSettings(ttl_s=ttl_s, max_entries=entries, max_bytes=size))


def selection(blocks: int = 0, *, local: bytes = b"") -> CachedSelection:
    prompt = Prompt(4 * blocks, local, blocks, bytes(8), bytes(8 * blocks))
    return CachedSelection(1, 0, prompt, 4 * blocks, None, True)


def test_an_entry_counts_its_hashes_and_the_bytes_of_its_names() -> None:
    kept = cache()
    kept.put(("möd", "g"), "id", selection(3, local=bytes(24)), 0.0)
    assert kept.size_bytes == 3 * 8 + 24 + len("möd".encode()) + 1 + 2


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
        # What is found where, its expiry and its bytes; oldest first.
        self.model: list[tuple[Place, CachedSelection, float, int]] = []
        self.now, self.evicted, self.expired, self.used = 0.0, 0, 0, 0

    def expire(self) -> None:
        live = [each for each in self.model if each[2] > self.now]
        self.expired += len(self.model) - len(live)
        self.model = live

    def leave_out(self, place: Place) -> None:
        self.model = [each for each in self.model if each[0] != place]

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(place=places, blocks=st.integers(0, 6))
    def put(self, place: Place, blocks: int) -> None:
        made = selection(blocks)
        self.kept.put(*place, made, self.now)
        ttl_s, entries, size = self.limits
        if not entries or not size:
            return
        self.leave_out(place)
        self.expire()
        self.model.append((place, made, self.now + ttl_s, 8 * blocks + 3))
        while len(self.model) > entries or sum(each[3] for each in self.model) > size:
            del self.model[0]
            self.evicted += 1

    @rule(place=places)
    def get(self, place: Place) -> None:
        """It stays where it is, for as long as it would."""
        found = self.kept.get(*place, self.now)
        self.expire()
        assert found is {each[0]: each[1] for each in self.model}.get(place)

    @rule(place=places, is_booked=st.booleans())
    def drop(self, place: Place, is_booked: bool) -> None:
        (self.kept.use_up if is_booked else self.kept.drop)(*place)
        self.used += is_booked
        self.leave_out(place)

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        if hasattr(self, "model"):
            self.kept.expire(self.now)
            self.expire()
            assert len(self.kept) == len(self.model)
            assert self.kept.size_bytes == sum(each[3] for each in self.model)
            kept, counts = self.kept, (self.evicted, self.expired, self.used)
            assert (kept.evicted, kept.expired, kept.used) == counts


TestAgainstAList = AgainstAList.TestCase
