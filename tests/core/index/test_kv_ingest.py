"""What becomes of events in the index; every recorded payload, then the rules one by one."""

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lean_selector.core.hashing import hash_seed, local_hashes
from lean_selector.core.index import kv_ingest
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import EventCounts, KvIngest
from lean_selector.core.index.shapes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    SkippedEvent,
    Tier,
)
from lean_selector.wire.kv_events import NotABatch
from tests.support.blocks import matches, store_blocks
from tests.support.kv_batches import decode_batch
from tests.support.kv_records import removed_blocks, stored_blocks

DATA = Path(__file__).parents[2] / "data" / "event_payloads.json"
PAYLOADS: list[dict[str, Any]] = json.loads(DATA.read_text())["payloads"]

Block = tuple[str, int, int | None, int, int]  # tier, dp_rank, parent hash, hash, local hash


def held_blocks(index: KvIndex) -> set[Block]:
    blocks = set()
    for run in (run for runs in index.dump() for run in runs):
        parent = run.parent_hash
        for block_hash, tokens_hash in zip(run.block_hashes, run.tokens_hashes, strict=True):
            blocks.add((run.tier.name.lower(), run.dp_rank, parent, block_hash, tokens_hash))
            parent = block_hash
    return blocks


def recorded_blocks(effect: dict[str, Any]) -> set[Block]:
    blocks = set()
    for run in effect["index_after"]:
        parent = run["parent_hash"]
        hashes = zip(run["block_hashes"], run["tokens_hashes"], strict=True)
        for block_hash, tokens_hash in hashes:
            blocks.add((run["tier"], run["dp_rank"], parent, block_hash, tokens_hash))
            parent = block_hash
    return blocks


L0, L1, L2 = 14643705804678351452, 16777012769546811212, 483935686894639516


def plain(tier: str = "device", first: int = 11, second: int = 12) -> set[Block]:
    """The two blocks that most payloads store."""
    return {(tier, 0, None, first, L0), (tier, 0, first, second, L1)}


# What the recording recommends in words, or D25 says; the others do what 1.3.1 did.
RECOMMENDED: dict[str, set[Block]] = {
    **dict.fromkeys(
        (
            *("batch_array4_extra", "mixed_unknown_type_then_valid", "mixed_valid_then_bad"),
            *("arr6_lora_str", "arr13_locality_local", "arr15_vllm_latest"),
            *("arr_extra_unknown_tail", "hash_bytes8", "medium_gpu", "locality_local"),
            *("clear_other_rank", "store_dup_diff_hash_same_tokens", "vllm_map_batch_dp0_omitted"),
        ),
        plain(),
    ),
    "event_string": set(),
    "arr_unknown_tag": set(),
    "parent_bytes": set(),  # the bytes are a hash, and one that nobody stored
    "medium_FOO": set(),
    "lora_name_int": set(),
    "mm_infos_bad": set(),
    "rem_session": set(),
    "batch_trailing_garbage": set(),  # which no engine sends
    "arr_ownership": plain("host_pinned"),
    "medium_cpu": plain("host_pinned"),
    "medium_disk": plain("disk"),
    "medium_STORAGE": plain("disk"),
    "hash_bytes32": plain(first=0x18191A1B1C1D1E1F, second=0x191A1B1C1D1E1F20),
    "mm_tuple3": {("device", 0, None, 11, 6551108848299546150), ("device", 0, 11, 12, L1)},
    "remove_parent_then_restore": plain() | {("device", 0, 12, 13, L2)},
    "rem_arr_locality": {("device", 0, None, 11, L0)},
}
AS_1_6_1 = ("arr7_metadata_cache_salt", "cache_salt", "cache_salt_and_lora")


@pytest.mark.parametrize("case", PAYLOADS, ids=lambda case: case["name"])
def test_recorded_payload(case: dict[str, Any]) -> None:
    index = KvIndex(4)
    ingest = KvIngest(index, worker_id=1, dp_rank=0)
    for payload in case["hex"]:
        with contextlib.suppress(NotABatch):
            ingest.apply(decode_batch(bytes.fromhex(payload)))
    if case["name"] in AS_1_6_1:
        expected = recorded_blocks(case["effect_1_6_1_differs"])
    elif case["name"] in RECOMMENDED:
        expected = RECOMMENDED[case["name"]]
    else:
        expected = recorded_blocks(case["effect_1_3_1"])
    assert held_blocks(index) == expected


# The rules


class Source:
    """An ingest, its index, and short ways to send events."""

    def __init__(self, block_size: int = 2) -> None:
        self.index = KvIndex(block_size)
        self.ingest = KvIngest(self.index, worker_id=7, dp_rank=3)

    def send(self, *events: Event, dp_rank: int | None = None) -> bool:
        return self.ingest.apply(EventBatch(dp_rank, list(events), []))

    def device(self, dp_rank: int = 3) -> int:
        return self.index.blocks(7, dp_rank, Tier.DEVICE)

    @property
    def skipped(self) -> dict[tuple[str, str], int]:
        return self.ingest.counts.skipped

    def tokens_hashes(self) -> dict[int, int]:
        return {block[3]: block[4] for block in held_blocks(self.index)}


@pytest.fixture
def source() -> Source:
    return Source()


def store(first: int = 1, parent: int | None = None, blocks: int = 1, **fields: Any) -> BlockStored:
    """Blocks first, first + 1, ..., each of two tokens of its own."""
    hashes = list(range(first, first + blocks))
    tokens = [token for block in hashes for token in (10 * block, 10 * block + 1)]
    hashes, tokens = fields.pop("block_hashes", hashes), fields.pop("token_ids", tokens)
    size, tier = fields.pop("block_size", 2), fields.pop("tier", Tier.DEVICE)
    return stored_blocks(hashes, parent, tokens, size, tier, **fields)


def local(first: int, salt: str | None = None, lora_name: str | None = None) -> int:
    tokens = [10 * first, 10 * first + 1]
    return int.from_bytes(local_hashes(tokens, 2, hash_seed(lora_name, salt)), "little")


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.DISK])
@pytest.mark.parametrize(("hashes", "tokens"), [([1, 2, 3, 4], 4), ([1, 2], 7)])
def test_blocks_without_a_hash_or_without_tokens_are_left_out(
    source: Source, hashes: list[int], tokens: int, tier: Tier
) -> None:
    source.send(store(block_hashes=hashes, token_ids=list(range(tokens)), tier=tier))
    assert source.index.blocks(7, 3, tier) == source.ingest.counts.blocks_stored == 2
    assert source.send(removed_blocks([1, 2, 3, 4], tier)) is False
    assert source.index.is_empty


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        pytest.param(store(block_size=4), "block_size", id="other block size"),
        pytest.param(store(block_size=0), "block_size", id="no block size"),
        pytest.param(store(tier=None), "unknown_medium", id="medium"),
        pytest.param(store(is_remote=True), "remote", id="remote"),
        pytest.param(store(kind="mamba"), "other_kind", id="kind"),
        pytest.param(store(kind=""), "other_kind", id="empty kind"),
        pytest.param(store(group_idx=1), "other_group", id="unlearned group"),
        pytest.param(store(parent=77), "unknown_parent", id="unknown parent"),
        pytest.param(store(parent=1), "self_reference", id="its own parent"),
        pytest.param(store(block_hashes=[1, 1]), "self_reference", id="twice"),
        pytest.param(store(blocks=0), "empty", id="no blocks"),
        pytest.param(store(token_ids=[1]), "empty", id="no complete block"),
        pytest.param(store(token_ids=[-1, 1]), "bad_tokens", id="negative token"),
        pytest.param(store(token_ids=[1, 2**32]), "bad_tokens", id="large token"),
        pytest.param(store(mm_hashes=[[-1]]), "bad_tokens", id="impossible mm hash"),
    ],
)
def test_stored_event_that_does_not_count(source: Source, event: BlockStored, reason: str) -> None:
    assert source.send(event) is False
    assert source.skipped == {("stored", reason): 1}
    assert source.index.is_empty


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (removed_blocks([1], None), "unknown_medium"),
        (removed_blocks([1], Tier.DEVICE, is_remote=True), "remote"),
        (removed_blocks([1], Tier.DEVICE, kind="sliding_window"), "other_kind"),
        (removed_blocks([1], Tier.DEVICE, group_idx=2), "other_group"),
    ],
)
def test_removed_event_that_does_not_count(
    source: Source, event: BlockRemoved, reason: str
) -> None:
    source.send(store(1), event)
    assert source.skipped == {("removed", reason): 1}
    assert source.device() == 1


def test_a_removed_event_in_parts_that_does_not_count_is_skipped_once(source: Source) -> None:
    """The last part counts for all of them."""
    source.send(store(1), removed_blocks([1], None, events=0), removed_blocks([2], None, events=1))
    assert source.skipped == {("removed", "unknown_medium"): 1}
    assert source.device() == 1


def test_surplus_tokens_are_ignored_even_bad_ones(source: Source) -> None:
    source.send(store(1, token_ids=[10, 11, -5, 2**40]))
    assert source.tokens_hashes() == {1: local(1)}


def test_dropped_events_teach_too_and_later_ones_correct_them(source: Source) -> None:
    source.send(store(1, group_idx=1, kind="full_attention", tier=None))
    source.send(store(2, group_idx=1))
    assert source.device() == 1
    source.send(store(1, group_idx=1, kind="mamba"), removed_blocks([2], Tier.DEVICE, group_idx=1))
    assert source.device() == 1


def test_each_rank_learns_its_own_groups(source: Source) -> None:
    source.send(store(1, group_idx=1, kind="full_attention"), dp_rank=3)
    source.send(store(2, group_idx=1), dp_rank=4)
    assert source.index.ranks() == [(7, 3)]


def test_groups_beyond_the_limit_are_not_learned(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_ingest, "MAX_GROUPS", 1)
    source.send(store(1, group_idx=1, kind="full_attention"))
    source.send(store(2, group_idx=2, kind="full_attention"))
    source.send(store(3, group_idx=1), store(4, group_idx=2))
    assert source.skipped == {("stored", "other_group"): 1}


@pytest.mark.parametrize("key", [None, 1.5, {"a": 1}, ["x"], [["x"], 0]], ids=repr)
def test_what_hangs_below_a_block_with_an_unknown_key_matches_no_prompt(key: object) -> None:
    """The blocks before it match; it and those after it are held, and can be removed (D26)."""
    source = Source()
    tokens = list(range(10))
    prompt = local_hashes(tokens, 2)

    def matched() -> int:
        found = matches(source.index, prompt).get((7, 3))
        return 0 if found is None else found.device

    def told(*events: object) -> None:
        source.ingest.apply(decode_batch(msgspec.msgpack.encode([1.5, events, None])))

    keys = [None, None, [key], None]
    told(["BlockStored", [1, 2, 3, 4], None, tokens[:8], 2, None, None, None, keys])
    told(["BlockStored", [5], 4, tokens[8:], 2])
    assert (matched(), source.device()) == (2, 5)
    assert source.ingest.counts.stored == 2
    assert [reason for _, reason in source.skipped] == [f"extra_key_{kind_of(key)}"]
    assert list(source.skipped.values()) == [1]
    told(["BlockRemoved", [5, 4, 3]])
    assert (matched(), source.device(), source.ingest.counts.blocks_removed) == (2, 2, 3)
    told(["BlockStored", [3, 4, 5], 2, tokens[4:], 2])
    assert matched() == 5


def kind_of(key: object) -> str:
    return {type(None): "nil", float: "float", dict: "map"}.get(type(key), "list")


SALTED, OF_THE_HOST = store(1, cache_salt="s"), store(2, parent=1, tier=Tier.HOST_PINNED)
ON_DISK = (store(1, cache_salt="t", tier=Tier.DISK), store(2, parent=1, tier=Tier.DISK))
CHAIN = (store(2, parent=1), store(3, parent=2), store(4, parent=3, cache_salt="t"))


@pytest.mark.parametrize(
    ("events", "salts"),
    [
        pytest.param((SALTED, *CHAIN), {2: "s", 3: "s", 4: "t"}, id="its parent's"),
        pytest.param((SALTED, OF_THE_HOST), {2: "s"}, id="its parent's on the device"),
        pytest.param((SALTED, *ON_DISK), {2: "t"}, id="its own tier knows it best"),
        pytest.param(
            (SALTED, removed_blocks([1], Tier.DEVICE), OF_THE_HOST), {2: None}, id="parent removed"
        ),
        pytest.param((SALTED, AllBlocksCleared(), OF_THE_HOST), {2: None}, id="rank cleared"),
    ],
)
def test_a_child_without_a_salt_has_that_of_its_parent(
    source: Source, events: tuple[Event, ...], salts: dict[int, str | None]
) -> None:
    source.send(*events)
    hashes = source.tokens_hashes()
    assert {block: hashes[block] for block in salts} == {
        block: local(block, salt) for block, salt in salts.items()
    }


def test_a_recovered_index_knows_no_salts_and_its_unsalted_children_match_nobody(
    source: Source,
) -> None:
    """A dump tells no salts: a child without one counts again once its prompt is told again."""
    tokens = [10, 11, 20, 21]
    salted, plain = (local_hashes(tokens, 2, hash_seed(None, salt)) for salt in ("s", None))

    def matched(prompt: bytes) -> int:
        found = matches(recovered.index, prompt).get((7, 3))
        return 0 if found is None else found.device

    source.send(store(1, cache_salt="s"))
    recovered = Source()
    for run in (run for runs in source.index.dump() for run in runs):
        names, local_hash = run.block_hashes, run.tokens_hashes[0].to_bytes(8, "little")
        store_blocks(recovered.index, (7, 3), run.tier, run.parent_hash, names, local_hash)
    recovered.send(store(2, parent=1))
    assert recovered.device() == 2
    assert (matched(salted), matched(plain)) == (1, 0)
    recovered.send(removed_blocks([2], Tier.DEVICE), store(1, blocks=2, cache_salt="s"))
    assert (matched(salted), matched(plain)) == (2, 0)


def test_the_oldest_salts_go_beyond_the_limit(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_ingest, "MAX_SALTED_BLOCKS", 2)
    source.send(store(1, blocks=3, cache_salt="s"), store(4, parent=1), store(5, parent=3))
    hashes = source.tokens_hashes()
    assert (hashes[4], hashes[5]) == (local(4), local(5, "s"))


def test_a_clear_empties_its_rank_on_all_tiers_and_no_other(source: Source) -> None:
    assert source.send(store(1), AllBlocksCleared(), store(2)) is True  # all that the source has
    source.send(store(1, tier=Tier.DISK))
    source.send(store(1), dp_rank=9)
    assert source.index.ranks() == [(7, 3), (7, 9)]
    assert source.send(AllBlocksCleared()) is False
    assert source.index.ranks() == [(7, 9)]


def test_a_source_that_starts_again_has_nothing_on_any_rank(source: Source) -> None:
    store_blocks(source.index, (7, 3), Tier.DEVICE, None, [9], b"12345678")  # recovered from a peer
    source.send(store(1, group_idx=1, kind="full_attention"))
    source.send(store(1), dp_rank=9)
    source.ingest.clear()
    assert source.index.is_empty
    source.send(store(2, group_idx=1))
    assert source.skipped == {("stored", "other_group"): 1}


def test_sources_that_name_one_rank_keep_their_own_blocks() -> None:
    """Both say rank 0, as engines do that know of no other; each has its own tokens in block 1."""
    index = KvIndex(2)
    first, second = KvIngest(index, 7, 0), KvIngest(index, 7, 1)
    sources = first, second
    prompts = [[1, 1], [2, 2]]

    def held() -> tuple[int, int]:
        found = [matches(index, local_hashes(prompt, 2)) for prompt in prompts]
        strays = [matches(each, local_hashes(prompts[1], 2)) for each in index.strays.values()]
        assert (7, 1) not in found[1]
        return len(found[0]), sum(map(len, strays))

    def tell(at: int, event: Event) -> None:
        sources[at].apply(EventBatch(0, [event], []))

    for again in range(3):
        for at, tokens in enumerate(prompts):
            tell(at, stored_blocks([1], None, tokens, 2, Tier.DEVICE))
        assert held() == (1, 1)
        assert index.blocks(7, 0, Tier.DEVICE) == 2
        assert second.stray_events == 1
        assert {first.is_alone, second.is_alone} == {False}
        if again < 2:
            tell(again, AllBlocksCleared())
            assert held() == (again, 1 - again)
            sources[1 - again].clear()
            assert held() == (0, 0)
            second.clear()
    second.close()
    assert held() == (1, 0)
    assert first.is_alone


def test_what_was_copied_for_a_rank_that_another_source_names_is_replaced() -> None:
    """No source of that rank would ever do it."""
    index = KvIndex(2)
    store_blocks(index, (7, 5), Tier.DEVICE, None, [9], b"12345678")
    index.learn((7, 5)).is_tentative = True
    KvIngest(index, 7, 0).apply(EventBatch(5, [removed_blocks([1], Tier.DEVICE)], []))
    assert index.is_empty


def test_ranks_beyond_the_limit_are_not_indexed(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_ingest, "MAX_RANKS", 1)
    source.send(store(1))
    assert source.send(store(1), store(2), dp_rank=9) is False
    assert source.index.ranks() == [(7, 3)]
    assert source.skipped == {("unknown", "too_many_ranks"): 2}


def test_counts_add_up() -> None:
    first, second = Source(), Source()
    first.send(store(1), removed_blocks([1], Tier.DEVICE), store(2, tier=None))
    unread = [SkippedEvent("stored", "malformed", each) for each in "xy"]
    first.ingest.apply(EventBatch(None, [], unread))
    second.send(store(1, blocks=2), AllBlocksCleared(), store(2, tier=None))
    total = EventCounts()
    total.add(first.ingest.counts)
    total.add(second.ingest.counts)
    assert list(total.results()) == [
        *(("stored", "applied", 2), ("removed", "applied", 1), ("cleared", "applied", 1)),
        *(("stored", "unknown_medium", 2), ("stored", "malformed", 2)),
    ]
    assert (total.blocks_stored, total.blocks_removed) == (3, 1)


def test_a_source_whose_blocks_have_another_size_is_mismatched_until_it_tells_better() -> None:
    source = Source(block_size=2)
    assert (source.ingest.block_size, source.ingest.is_mismatched) == (2, False)
    source.send(store(1, block_size=4))
    assert (source.ingest.is_mismatched, source.ingest.other_size) == (True, 4)
    source.send(store(2))
    assert (source.ingest.is_mismatched, source.ingest.stored) == (False, 1)


def test_whoever_predicts_hears_which_ranks_an_engine_emptied() -> None:
    emptied: list[tuple[int, int]] = []
    ingest = KvIngest(KvIndex(4), 7, 0, lambda *rank: emptied.append(rank))
    for dp_rank in (0, 3):
        stored = stored_blocks([1], None, [1, 2, 3, 4], 4, Tier.DEVICE)
        ingest.apply(EventBatch(dp_rank, [stored], []))
    ingest.apply(EventBatch(3, [AllBlocksCleared()], []))
    assert (emptied, ingest.dp_ranks) == ([(7, 3)], {0, 3})
    ingest.clear()
    assert sorted(emptied[1:]) == [(7, 0), (7, 3)]
