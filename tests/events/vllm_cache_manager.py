"""vLLM's own cache manager without an engine: what it finds cached of prompts, and its events.

Run by an interpreter that has vLLM: `python vllm_cache_manager.py LOOKAHEAD`. Prints a line of JSON
for each request: its prompt, the tokens that were found cached, and the batch of events, in hex,
that tells what the request stored and evicted. Set up as `Scheduler` does it.
"""

import json
import random
import sys

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

SIZE, BLOCKS, REQUESTS, OUTPUT = 16, 600, 400, 3
LOOKAHEAD = int(sys.argv[1])

hash_of = get_hash_fn_by_name("sha256")
kv_cache_utils.init_none_hash(hash_of)
hasher = kv_cache_utils.get_request_block_hasher(SIZE, hash_of, num_hash_lookahead_tokens=LOOKAHEAD)
attention = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
group = KVCacheGroupSpec(["layer"], attention, is_eagle_group=bool(LOOKAHEAD))
manager = KVCacheManager(
    kv_cache_config=KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group]),
    max_model_len=1 << 20,
    hash_block_size=SIZE,
    scheduler_block_size=SIZE,
    enable_caching=True,
    enable_kv_cache_events=True,
    use_eagle=False,  # with lookahead hashes no block is dropped
    num_hash_lookahead_tokens=LOOKAHEAD,
)
draw = random.Random(LOOKAHEAD)


def tokens(count: int) -> list[int]:
    return [draw.randrange(1000, 30_000) for _ in range(count)]


def found(request: Request) -> bool:
    """Places the request; False where there is no room."""
    blocks, request.num_computed_tokens = manager.get_computed_blocks(request)[:2]
    left = request.num_tokens - request.num_computed_tokens
    return manager.allocate_slots(request, left, request.num_computed_tokens, blocks) is not None


systems = [tokens(SIZE * count) for count in (3, 5, 8)]
running: list[Request] = []
prompt: list[int] = []
for number in range(REQUESTS):
    if number % 10 == 8:
        prompt = prompt[:-1]
    elif number % 10 != 9:  # else the one before once more
        prompt = systems[number % 3] + tokens(draw.choice([0, 1, 5, 16, 17, 40, 90]))
    request = Request(
        request_id=str(number),
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=OUTPUT + 1),
        pooling_params=None,
        block_hasher=hasher,
    )
    while not found(request):
        manager.free(running.pop(0))
    cached, request.num_computed_tokens = request.num_computed_tokens, request.num_tokens
    for _ in range(OUTPUT):
        request.append_output_token_ids(draw.randrange(1000, 30_000))
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    running.append(request)
    if len(running) > OUTPUT:
        manager.free(running.pop(0))
    batch = KVEventBatch(ts=0.0, events=manager.take_events())
    events = msgspec.msgpack.encode(batch).hex()
    line = json.dumps({"prompt": prompt, "cached": cached, "events": events})
    sys.stdout.write(f"{line}\n")
