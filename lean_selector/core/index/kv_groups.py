"""Which reports count, if several KV cache groups of an engine report the same blocks.

A hybrid model has several groups of layers. Each stores and evicts its own copy of a block, and
reports it. vLLM takes a block for cached only if every full-attention group has it. All groups
store the same blocks in the same step, one after the other, but each evicts when it must. So a
block is cached from the first group's `stored` to the first group's `removed`: of all reports about
it, the first counts, and those of the other groups follow it.

How many groups there are is seen from their first reports. So a rank's first reports are kept, a
few: a group that is new is about to follow them."""

from collections import OrderedDict

_MOST_FIRST = 64  # a step of the engine has one for each group and request
# Blocks that some group has not reported yet, such as those that one group alone has evicted. The
# oldest are dropped first: the group that follows is then taken for the first one.
_MOST_BLOCKS = 1 << 17

# Groups, first reports and `_ahead` of GroupReports
Report = tuple[int, int, bytes]
GroupState = tuple[list[int], list[Report] | None, list[tuple[int, bytes, dict[int, int]]]]


class GroupReports:
    """Reports of one rank's full-attention groups. A `kind` is any number; reports of different
    kinds do not follow each other. Engine hashes are packed, 8 bytes each."""

    def __init__(self) -> None:
        # The group that is known to be the only one, and so need not be asked for; -1: none.
        self.only = -1
        self._groups: set[int] = set()
        # The first reports: (group, kind, hashes). None: after so many, all groups are known.
        self._first: list[Report] | None = []
        # (kind, hash) -> group -> how many reports it has more than the group with the fewest
        self._ahead: OrderedDict[tuple[int, bytes], dict[int, int]] = OrderedDict()

    @property
    def is_open(self) -> bool:
        """Whether it matters for later reports which single reports came before."""
        return len(self._groups) > 1 or bool(self._first)

    @property
    def unequal(self) -> int:
        """How many blocks some group has not reported yet."""
        return len(self._ahead)

    def state(self) -> GroupState:
        """Return all that is known, for `restore`; ([], [], []) if that is nothing."""
        ahead = [(*report, counts) for report, counts in self._ahead.items()]
        return sorted(self._groups), self._first, ahead

    def restore(self, state: GroupState) -> None:
        groups, first, ahead = state
        self._first = None if first is None else list(first)
        self._groups = set(groups)
        self.only = groups[0] if self._first is None and len(groups) == 1 else -1
        self._ahead = OrderedDict(
            [((kind, engine_hash), counts) for kind, engine_hash, counts in ahead]
        )

    def join(self, group: int) -> None:
        """Record that a group stores blocks on which prefix matching relies."""
        if group in self._groups:
            return
        self._groups.add(group)
        self.only = -1
        if self._first is not None and len(self._groups) > 1:
            self._ahead.clear()
            for earlier, kind, hashes in self._first:
                if earlier in self._groups:
                    self._count_all(earlier, kind, hashes)

    def leave(self, group: int) -> None:
        """Record that prefix matching does not rely on a group's blocks."""
        if group in self._groups:
            self._groups.remove(group)
            self._ahead.clear()

    def leading(self, group: int, kind: int, hashes: bytes) -> bytes:
        """Record a report. Return those of its hashes that no other group has reported before. A
        report of a group that has stored nothing counts in any case."""
        if self._first is not None:
            self._first.append((group, kind, hashes))
            if len(self._first) > _MOST_FIRST:
                self._first = None
        if group not in self._groups:
            return hashes
        if len(self._groups) == 1:
            self.only = group if self._first is None else -1
            return hashes
        return self._count_all(group, kind, hashes)

    def is_following(self, group: int, kind: int, hashes: bytes) -> bool:
        """Whether other groups have reported all these hashes before. Records nothing."""
        if group not in self._groups or not self._ahead:
            return False
        for at in range(0, len(hashes), 8):
            ahead = self._ahead.get((kind, hashes[at : at + 8]))
            if ahead is None or ahead.get(group, 0) == max(ahead.values()):
                return False
        return True

    def _count_all(self, group: int, kind: int, hashes: bytes) -> bytes:
        found: list[bytes] = []
        for at in range(0, len(hashes), 8):
            engine_hash = hashes[at : at + 8]
            if self._count(group, (kind, engine_hash)):
                found.append(engine_hash)
        while len(self._ahead) > _MOST_BLOCKS:
            self._ahead.popitem(last=False)
        return hashes if len(found) << 3 == len(hashes) else b"".join(found)

    def _count(self, group: int, report: tuple[int, bytes]) -> bool:
        """Count a group's report of one block. Return whether no other group has made it yet."""
        ahead = self._ahead.setdefault(report, {})
        mine = ahead.get(group, 0)
        is_first = mine >= max(ahead.values(), default=0)
        ahead[group] = mine + 1
        if len(ahead) == len(self._groups):
            least = min(ahead.values())
            for each in list(ahead):
                ahead[each] -= least
                if not ahead[each]:
                    del ahead[each]
            if not ahead:
                del self._ahead[report]
        return is_first
