"""The index against vLLM's own cache manager, which runs without an engine.

By hand, as tests/client/test_vllm_engine.py says; vLLM 0.33 and later look ahead:

    LEAN_SELECTOR_VLLM=/tmp/vllm/bin/python pytest -m engine tests/events/test_vllm_cache_manager.py
"""

import json
import subprocess
from pathlib import Path

import pytest

from lean_selector.core.hashing import local_hashes
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.shapes import Matched
from tests.client.test_vllm_engine import PYTHON
from tests.support.kv_batches import decode_batch

SIZE = 16

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="LEAN_SELECTOR_VLLM names no interpreter with vLLM"),
]


@pytest.mark.parametrize("looks_ahead", [False, True], ids=["plain", "lookahead"])
def test_what_the_index_finds_is_what_the_manager_hits(looks_ahead: bool) -> None:
    """Of a prompt that ends with its last block vLLM computes that block again, to have logits."""
    script = Path(__file__).with_name("vllm_cache_manager.py")
    command = [PYTHON, str(script), str(int(looks_ahead))]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    index = KvIndex(SIZE)
    ingest = KvIngest(index, 1, 0, is_eagle=looks_ahead)
    hits = 0
    for line in said.splitlines():
        told = json.loads(line)
        prompt = told["prompt"]
        local = local_hashes(prompt, SIZE, is_eagle=looks_ahead)
        held = index.match(local).get((1, 0), Matched(0)).device
        assert min(held, (len(prompt) - 1) // SIZE) * SIZE == told["cached"]
        hits += held > 0
        ingest.apply(decode_batch(bytes.fromhex(told["events"])))
    assert hits > 300
    assert not ingest.is_mismatched
