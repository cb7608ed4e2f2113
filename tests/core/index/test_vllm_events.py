"""What vLLM's events say beyond plain chains: copies, lookahead, parts of blocks, hashes alone.

What an engine's copies come to is in tests/properties/test_vllm_model.py.

Blocks have 4 tokens here, and a block's hash in the engine is a small number.
"""

from typing import Any

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from lean_selector.core.hashing import hash_seed, local_hashes
from lean_selector.core.index import kv_groups
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.shapes import Matched, Tier
from tests.support.blocks import matches
from tests.support.kv_batches import decode_batch

P, X, Y, Z = ([block] * 4 for block in (1, 2, 3, 4))
IMAGE = "opaque-image"


class Engine:
    """Sends batches."""

    def __init__(self, is_eagle: bool = False) -> None:
        self.index = KvIndex(4)
        self.ingest = KvIngest(self.index, worker_id=1, dp_rank=0, is_eagle=is_eagle)

    def send(self, *events: dict[str, Any]) -> None:
        self.ingest.apply(decode_batch(msgspec.msgpack.encode([1.5, events, 0])))

    def match(self, tokens: list[int], mm_hashes: Any = None) -> Matched:
        local = local_hashes(tokens, 4, mm_hashes=mm_hashes, is_eagle=self.ingest.is_eagle)
        return matches(self.index, local).get((1, 0), Matched(0))

    def hit(self, tokens: list[int], mm_hashes: Any = None) -> int:
        return self.match(tokens, mm_hashes).device

    @property
    def skipped(self) -> dict[tuple[str, str], int]:
        return self.ingest.counts.skipped


def stored(names: list[int], tokens: list[Any], parent: int | None = None, **more: Any) -> Any:
    event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent}
    event |= {"token_ids": tokens, "block_size": 4, "medium": "GPU", "group_idx": 0}
    return event | more


def removed(*names: int, **more: Any) -> Any:
    event = {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": 0}
    return event | more


@pytest.fixture
def engine() -> Engine:
    return Engine()


# Copies


def test_no_more_copies_are_believed_than_the_engine_has_blocks(engine: Engine) -> None:
    engine.index.set_bound(1, 3, None)
    for _ in range(9):
        engine.send(stored([1, 2], P + X))
    engine.send(removed(1), removed(1), removed(2), removed(2))
    assert engine.index.is_empty


def test_a_block_with_a_copy_keeps_its_salt_and_its_child_has_it(engine: Engine) -> None:
    engine.send(stored([1], P, cache_salt="s"), stored([1], P, cache_salt="s"), removed(1))
    engine.send(stored([2], X, 1))
    assert engine.hit(P + X) == 0
    assert matches(engine.index, local_hashes(P + X, 4, hash_seed(None, "s"))) == {
        (1, 0): Matched(2)
    }


def test_a_prompt_of_one_block_that_is_computed_again_is_a_copy_whatever_comes_next(
    engine: Engine,
) -> None:
    """No hit is announced here: engines compute the last token of a prompt in any case."""
    engine.send(stored([1], P))
    engine.send(stored([1], P), stored([2], X, 1))
    engine.send(removed(1))
    assert engine.hit(P + X) == 2


def test_an_announced_hit_is_no_copy_from_the_first_that_is_recognized_on(engine: Engine) -> None:
    engine.send(stored([1, 2], P + X))
    engine.send(stored([1, 2], P + X), stored([3], Y, 2))
    engine.send(stored([1, 2], P + X), removed(2))
    assert engine.hit(P + X) == 1


# Groups of full-attention layers


def of(group: int, event: Any) -> Any:
    kind = {"kv_cache_spec_kind": "full_attention"} if event["type"] == "BlockStored" else {}
    return event | {"group_idx": group} | kind


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_a_block_is_held_while_all_groups_have_it(
    engine: Engine, medium: str, together: bool
) -> None:
    def send(*events: Any) -> int:
        given = [event | {"medium": medium} for event in events]
        for each in [given] if together else [[event] for event in given]:
            engine.send(*each)
        found = engine.match(P + X)
        return found.device + found.host

    whole = [of(group, stored([1, 2], P + X)) for group in range(3)]
    assert send(*whole) == 2
    assert send(of(1, removed(2))) == 1
    assert send(*whole) == 2  # now group 1 has one of block 2, and the others two
    assert send(of(0, removed(2))) == 2
    assert send(of(2, removed(1, 2))) == 2
    assert send(of(1, removed(2))) == 1
    assert send(of(2, removed(1))) == 0
    assert engine.index.is_empty
    assert send(*whole) == 2
    engine.send({"type": "AllBlocksCleared"})
    assert send(*whole, of(0, removed(2))) == 1


def test_a_group_that_is_alone_for_long_has_a_copy_for_each_store(engine: Engine) -> None:
    for _ in range(100):
        engine.send(of(0, stored([1], P)))
    engine.send(of(1, stored([2], X, 1)), of(0, stored([2], X, 1)))
    for _ in range(99):
        engine.send(of(0, removed(1)))
    assert engine.hit(P + X) == 2
    engine.send(of(1, removed(2)), of(0, removed(1)))
    assert engine.index.is_empty


def test_a_group_whose_blocks_do_not_count_after_all_has_no_say(engine: Engine) -> None:
    engine.send(*(of(group, stored([1], P)) for group in (0, 1)))
    engine.send(of(1, stored([2], X, 1)) | {"kv_cache_spec_kind": "mamba"}, of(1, removed(1)))
    engine.send(of(0, stored([1], P)), of(0, removed(1)))
    assert engine.hit(P) == 1


def test_the_blocks_that_only_some_groups_reported_are_bounded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [of(group, stored([1, 2], P + X)) for group in (0, 1)]
    engine.send(*both, *both)
    monkeypatch.setattr(kv_groups, "_MOST_BLOCKS", 1)
    engine.send(of(0, removed(1, 2)), of(1, removed(1, 2)))
    assert engine.hit(P + X) == 0  # that group 0 had evicted block 1 was forgotten
    assert engine.index.blocks(1, 0, Tier.DEVICE) == 1


def test_a_chain_of_which_another_group_has_reported_a_part_counts_in_the_other() -> None:
    engine = Engine()
    engine.send(of(0, stored([1], P)), of(1, stored([1, 2], P + X)), of(0, stored([2], X, 1)))
    engine.send(of(1, removed(2)))
    assert engine.hit(P + X) == 1
    engine.send(of(1, removed(1)))
    assert engine.index.is_empty


def test_hashes_alone_of_several_groups_are_one_block() -> None:
    engine = Engine()
    cpu: dict[str, Any] = {"medium": "CPU", "block_size": 0}
    engine.send(*(of(group, stored([1], P)) for group in (0, 1)))
    engine.send(*(of(group, stored([1], [], **cpu)) for group in (0, 1)), of(0, removed(1)))
    assert engine.match(P) == Matched(0, 1)
    engine.send(of(1, removed(1, medium="CPU")))
    assert engine.index.is_empty
    assert not engine.skipped


# Lookahead


def lookahead(names: list[int], tokens: list[int], after: int, parent: int | None = None) -> Any:
    following = [*tokens[4::4], after]
    return stored(names, tokens, parent, lookahead_token_ids=[[token] for token in following])


def test_a_block_is_there_until_it_is_removed_under_each_of_its_hashes() -> None:
    engine = Engine()
    engine.send(lookahead([100, 101], P + X, 9), lookahead([200, 201], P + Y, 9))
    engine.send(removed(101), removed(100))
    assert engine.hit(P + Y) == 2
    engine.send(lookahead([202], Z, 9, 200))
    assert engine.hit(P + Z) == 2
    assert not engine.skipped


def test_a_block_held_under_another_successor_is_no_hit_where_prompts_are_hashed_so() -> None:
    engine = Engine(is_eagle=True)
    engine.send(lookahead([100, 101], P + X, 9), lookahead([200, 201], P + Y, 8))
    assert [engine.hit(P + X + [9]), engine.hit(P + X + [8])] == [2, 1]
    assert [engine.hit(P + Y + [8]), engine.hit(P + Z + [8])] == [2, 0]
    engine.send(removed(101), removed(100))
    assert [engine.hit(P + X + [9]), engine.hit(P + Y + [8])] == [0, 2]
    assert not engine.ingest.is_mismatched


def test_a_token_behind_a_block_must_be_one() -> None:
    engine = Engine(is_eagle=True)
    engine.send(lookahead([100], P, 2**32))
    assert engine.skipped == {("stored", "bad_tokens"): 1}


def test_an_engine_that_looks_ahead_otherwise_than_prompts_is_mismatched() -> None:
    plain = Engine(is_eagle=True)
    plain.send(stored([1], P))
    pairs = Engine()
    pairs.send(stored([1], [[1, 1], [1, 1], [1, 1], [1, 2]]))
    assert plain.ingest.is_mismatched
    assert pairs.ingest.is_mismatched


# Ends within a block, and hashes alone


def test_an_end_within_a_block_is_no_mismatch(engine: Engine) -> None:
    for name in range(50, 60):
        engine.send(stored([name], [1, 1], block_size=2), removed(name))
    engine.send(stored([1], P))
    for name in range(50, 60):
        engine.send(stored([name], [2, 2], 1, block_size=2), removed(name))
    assert engine.hit(P) == 1
    assert not engine.ingest.is_mismatched
    assert engine.skipped == {("stored", "partial"): 20}


def test_an_engine_with_smaller_blocks_is_mismatched(engine: Engine) -> None:
    engine.send(stored([1, 2], P, block_size=2))
    assert engine.ingest.is_mismatched
    assert engine.skipped == {("stored", "block_size"): 1}


def test_hashes_alone_are_resolved_by_what_the_rank_holds() -> None:
    engine = Engine()
    cpu: dict[str, Any] = {"medium": "CPU", "block_size": 0}
    engine.send(stored([1, 2], P + X), stored([1], [], **cpu), stored([2], [], **cpu))
    engine.send(stored([7], [], **cpu), stored([2], [], **cpu | {"medium": "STORAGE"}))
    engine.send(removed(2), removed(1))
    assert engine.match(P + X) == Matched(0, 2)
    engine.send(removed(2, medium="CPU"))
    assert engine.match(P + X) == Matched(0, 1, 1)
    assert not engine.ingest.is_mismatched
    assert engine.skipped == {("stored", "unknown_block"): 1}


# Fields


def test_images_are_told_apart_by_identifiers_of_any_text() -> None:
    engine = Engine()
    engine.send(stored([1], P, extra_keys=[["lora", [IMAGE, -3]]], lora_name=None))
    assert [engine.hit(P), engine.hit(P, [[5]])] == [0, 0]
    assert engine.hit(P, [[xxh3_64_intdigest(IMAGE.encode())]]) == 1


def test_an_adapter_named_in_hex_is_no_image() -> None:
    engine = Engine()
    name = "a" * 64
    engine.send(stored([1], P, extra_keys=[[name, [IMAGE, 0]]], lora_name=name))
    ((run,),) = engine.index.dump()
    seed = hash_seed(name)
    image = xxh3_64_intdigest(IMAGE.encode())
    assert run.tokens_hashes[0].to_bytes(8, "little") == local_hashes(P, 4, seed, [[image]])


def test_an_image_named_as_the_adapter_counts() -> None:
    """As bare digits, as vLLM once sent it: the adapter's name comes first, and once."""
    engine, name = Engine(), "a" * 64
    engine.send(stored([1], P, extra_keys=[[name, name]], lora_name=name))
    ((run,),) = engine.index.dump()
    local = local_hashes(P, 4, hash_seed(name), [[int(name[:16], 16)]])
    assert run.tokens_hashes[0].to_bytes(8, "little") == local


def test_an_image_behind_a_block_is_not_in_it() -> None:
    engine = Engine()
    engine.send(stored([1], P, extra_keys=[[[IMAGE, 4]]], lookahead_token_ids=[[7]]))
    assert engine.hit(P) == 1


@pytest.mark.parametrize(("locality", "blocks"), [(None, 0), ("REMOTE", 0), ("LOCAL", 1)], ids=str)
def test_what_a_secondary_tier_owns_is_the_workers_where_it_is_local(
    engine: Engine, locality: str | None, blocks: int
) -> None:
    more = {"ownership": "fs", "locality": locality, "medium": "STORAGE"}
    engine.send(stored([1], P), stored([2], X, 1, **more))
    assert engine.match(P + X) == Matched(1, 0, blocks)
    engine.send(stored([2], X, 1, medium="STORAGE"), removed(2, **more))
    assert engine.index.blocks(1, 0, Tier.DISK) == 1


def test_a_kind_that_the_engine_could_not_tell_says_nothing(engine: Engine) -> None:
    engine.send(stored([1], P, kv_cache_spec_kind="unknown"))
    engine.send(stored([2], X, 1, kv_cache_spec_kind="unknown", group_idx=1))
    engine.send(removed(1))
    assert engine.index.is_empty
    assert engine.skipped == {("stored", "other_group"): 1}
