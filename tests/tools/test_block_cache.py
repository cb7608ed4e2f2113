"""BlockCache against a naive model that looks for the oldest idle leaf by search."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lean_selector.tools.simulated_engines import BlockCache, HeldChain

CAPACITY = 7
Path = tuple[int, ...]
PATHS = st.lists(st.integers(0, 2), max_size=5).map(tuple)


def chain(path: Path) -> list[Path]:
    return [path[: i + 1] for i in range(len(path))]


class NaiveCache:
    """Blocks are paths. Every step is a search over all of them."""

    def __init__(self) -> None:
        self.users: dict[Path, int] = {}  # 0 for an idle block
        self.idle_since: dict[Path, int] = {}
        self.clock = 0

    def hold(self, blocks: list[Path]) -> HeldChain:
        hit = 0
        while hit < len(blocks) and blocks[hit] in self.users:
            self.users[blocks[hit]] += 1
            hit += 1
        stored, evicted = 0, []
        for block in blocks[hit:]:
            if len(self.users) == CAPACITY:
                victim = self.oldest_idle_leaf()
                if victim is None:
                    break
                del self.users[victim]
                evicted.append(hash(victim))
            self.users[block] = 1
            stored += 1
        return HeldChain(hit, stored, evicted)

    def oldest_idle_leaf(self) -> Path | None:
        parents = {path[:-1] for path in self.users}
        idle = [path for path, n in self.users.items() if n == 0 and path not in parents]
        return min(idle, key=self.idle_since.__getitem__, default=None)

    def release(self, blocks: list[Path]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            self.idle_since[block] = self.clock = self.clock + 1


class CacheMachine(RuleBasedStateMachine):
    held: Bundle[tuple[Path, int]] = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.naive = BlockCache(CAPACITY), NaiveCache()

    @rule(target=held, path=PATHS)
    def hold(self, path: Path) -> tuple[Path, int]:
        blocks = chain(path)
        placed = self.cache.hold([hash(block) for block in blocks])
        assert placed == self.naive.hold(blocks)
        return path, placed.hit + placed.stored

    @rule(target=held, grown=consumes(held), step=st.integers(0, 2))
    def grow(self, grown: tuple[Path, int], step: int) -> tuple[Path, int]:
        path, count = grown
        if count < len(path):
            return grown  # its last blocks found no room, so it must not go on
        longer = (*path, step)
        placed = self.cache.hold([hash(longer)])
        assert placed == self.naive.hold([longer])
        return longer, count + placed.hit + placed.stored

    @rule(done=consumes(held))
    def release(self, done: tuple[Path, int]) -> None:
        path, count = done
        blocks = chain(path)[:count]
        self.cache.release([hash(block) for block in blocks])
        self.naive.release(blocks)

    @invariant()
    def holds_the_same_blocks_within_its_capacity(self) -> None:
        assert len(self.cache) == len(self.naive.users) <= CAPACITY
        assert all(hash(path) in self.cache for path in self.naive.users)

    @invariant()
    def never_holds_a_block_without_its_parent(self) -> None:
        assert all(len(path) == 1 or path[:-1] in self.naive.users for path in self.naive.users)


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockCache = CacheMachine.TestCase
