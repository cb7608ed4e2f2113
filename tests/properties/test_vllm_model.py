"""The index against a naive vLLM: physical blocks with names, of which it tells each by itself.

A dict of physical blocks is the engine; what it would hit of a prompt follows vLLM's rule, the
longest beginning whose every block it has under the hash that the prompt gives it. Blocks have one
token here and prompts few, so that requests share, copy and evict all the time.
"""

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from lean_selector.core.hashing import local_hashes
from lean_selector.core.index.engine_hashes import EngineHashes, HashesInDict
from lean_selector.core.index.hashes_packed import HashesPacked
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.shapes import (
    AllBlocksCleared,
    BlockStored,
    Event,
    EventBatch,
    Matched,
    Tier,
)
from tests.conftest import Rounds
from tests.support.blocks import matches
from tests.support.kv_records import removed_blocks, stored_blocks

SIZE = 2  # tokens of a block; a hash is of one, where ends within blocks are kept
STEPS = 1_500  # 100 000 by hand, in each form, without a difference
Prefix = tuple[int, ...]


class Vllm:
    """What it holds on the device, as the names of each physical block, and on the CPU.

    Each of its groups of full-attention layers has its own blocks, and evicts them by itself."""

    def __init__(self, looks_ahead: bool, reports: bool, groups: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.looks_ahead, self.reports = looks_ahead, reports
        self.groups = range(groups)
        self.device: dict[int, tuple[int, int]] = {}  # block id -> group, name
        self.cpu: Counter[int] = Counter()
        self.names: dict[Prefix, int] = {}
        self.ids = 0
        self.events: list[Event] = []

    def name(self, tokens: Prefix) -> int:
        """Of the block that ends here; `tokens` go one further where the engine looks ahead."""
        return self.names.setdefault(tokens, self.draw.getrandbits(64))

    def name_of_block(self, prompt: Prefix, block: int) -> int:
        return self.name(prompt[: (block + 1) * SIZE + self.looks_ahead])

    def blocks_of(self, prompt: Prefix) -> int:
        return (len(prompt) - self.looks_ahead) // SIZE

    def has(self, name: int) -> bool:
        return set(self.groups) == {group for group, each in self.device.values() if each == name}

    def hits(self, prompt: Prefix) -> tuple[int, int]:
        """On the device, and on from there on the CPU."""
        blocks, at = self.blocks_of(prompt), 0
        while at < blocks and self.has(self.name_of_block(prompt, at)):
            at += 1
        end = at
        while end < blocks and self.cpu[self.name_of_block(prompt, end)]:
            end += 1
        return at, end - at

    def store(self, prompt: Prefix, first: int, end: int) -> None:
        if first >= end:
            return
        names = [self.name_of_block(prompt, block) for block in range(first, end)]
        self.hold(names)
        parent = self.name_of_block(prompt, first - 1) if first else None
        self.announce(prompt, names, parent, first, end)

    def hold(self, names: list[int]) -> None:
        for group in self.groups:
            for name in names:
                self.ids += 1
                self.device[self.ids] = group, name

    def announce(
        self, prompt: Prefix, names: list[int], parent: int | None, first: int, end: int
    ) -> None:
        tokens = list(prompt[first * SIZE : end * SIZE])
        behind = prompt[end * SIZE] if self.looks_ahead else None
        self.tell(stored_blocks(names, parent, tokens, SIZE, Tier.DEVICE, next_token=behind))

    def tell(self, event: BlockStored) -> None:
        """Once for each group, one after the other."""
        for group in self.groups:
            self.events.append(replace(event, group_idx=group, kind="full_attention"))

    def request(self, prompt: Prefix, is_read: bool) -> None:
        """A prompt of which all but the last token may be found cached."""
        found = min(self.hits(prompt)[0], (len(prompt) - 1) // SIZE) if is_read else 0
        blocks = self.blocks_of(prompt)
        if self.reports and found and found < blocks:
            names = [self.name_of_block(prompt, block) for block in range(found)]
            self.announce(prompt, names, None, 0, found)
        self.store(prompt, found, blocks)
        if not self.looks_ahead and len(prompt) % SIZE:  # an end within a block
            name, parent = self.name(prompt), prompt[: len(prompt) - 1]
            self.hold([name])
            above = self.name(parent) if parent else None
            self.tell(stored_blocks([name], above, [prompt[-1]], 1, Tier.DEVICE))

    def evict(self) -> None:
        if self.device:
            group, name = self.device.pop(self.draw.choice(list(self.device)))
            self.events.append(removed_blocks([name], Tier.DEVICE, group))

    def offload(self, prompt: Prefix) -> None:
        """A block that is on the device goes to the CPU, too; its hash alone is told."""
        at, _ = self.hits(prompt)
        if at and not self.looks_ahead:  # which no connector is used with
            name = self.name_of_block(prompt, self.draw.randrange(at))
            self.cpu[name] += 1
            self.events.append(stored_blocks([name], None, [], 0, Tier.HOST_PINNED))

    def evict_from_cpu(self) -> None:
        held = sorted(+self.cpu)
        if held:
            name = self.draw.choice(held)
            self.cpu[name] -= 1
            self.events.append(removed_blocks([name], Tier.HOST_PINNED))

    def clear(self) -> None:
        self.device.clear()
        self.cpu.clear()
        self.events.append(AllBlocksCleared())

    def step(self) -> list[Event]:
        kind = self.draw.random()
        prompt = tuple(self.draw.choices((1, 2), k=self.draw.randint(3 if self.reports else 1, 8)))
        if kind < 0.45:
            # Of an engine that announces what it found, what is held from the first block on is
            # none: one block that is computed anew could not be told from one that was found.
            self.request(prompt, self.reports or self.draw.random() < 0.8)
        elif kind < 0.85:
            self.evict()
        elif kind < 0.92:
            self.offload(prompt)
        elif kind < 0.999:
            self.evict_from_cpu()
        else:
            self.clear()
        events, self.events = self.events, []
        return events


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("reports", [False, True], ids=["silent", "reports"])
@pytest.mark.parametrize("looks_ahead", [False, True], ids=["plain", "lookahead"])
@pytest.mark.parametrize("new_hashes", [HashesInDict, HashesPacked])
def test_the_index_predicts_what_the_engine_hits(
    new_hashes: type[EngineHashes], looks_ahead: bool, reports: bool, groups: int, rounds: Rounds
) -> None:
    for seed in rounds(1):
        engine = Vllm(looks_ahead, reports, groups, seed)
        play(engine, new_hashes, STEPS if groups == 1 else STEPS // 3)


def play(engine: Vllm, new_hashes: type[EngineHashes], steps: int) -> None:
    looks_ahead, reports = engine.looks_ahead, engine.reports
    index = KvIndex(SIZE, new_hashes=new_hashes)
    ingest = KvIngest(index, 1, 0, is_eagle=looks_ahead)
    for length in (5, 7) if reports else ():
        # What announces a hit of several blocks first is known by it: one block may be a copy.
        engine.request((1,) * length, is_read=True)
        ingest.apply(EventBatch(0, engine.events, []))
        engine.events = []
    for _ in range(steps):
        ingest.apply(EventBatch(0, engine.step(), []))
        for _ in range(3):
            prompt = tuple(engine.draw.choices((1, 2), k=9))
            local = local_hashes(prompt, SIZE, is_eagle=looks_ahead)
            found = matches(index, local).get((1, 0), Matched(0))
            assert (found.device, found.host) == engine.hits(prompt), prompt
    assert not ingest.is_mismatched
    while engine.device:
        engine.evict()
    while +engine.cpu:
        engine.evict_from_cpu()
    ingest.apply(EventBatch(0, engine.events, []))
    assert index.is_empty
