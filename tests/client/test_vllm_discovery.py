"""vLLM, unmodified, that a selector finds by its URL alone: nothing is registered.

By hand, as `test_vllm_engine.py` says, with a vLLM that serves /kv_event_sources.
"""

import json
from collections.abc import Iterator

import pytest

from lean_selector.workers.particulars import worker_id_of
from tests.client.test_vllm_engine import (
    BLOCK_SIZE,
    BLOCKS,
    CACHED,
    CAPACITY,
    MODEL,
    PYTHON,
    Engine,
    prompt,
)
from tests.client.tiny_model import write_model
from tests.support.running_service import RunningService, wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="LEAN_SELECTOR_VLLM names no interpreter with vLLM"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("vllm")
    write_model(folder / "model")
    with Engine(1, folder, int_hashes=False).running() as started:
        started.wait()
        yield started


def test_a_url_is_all_that_is_said_of_an_engine(engine: Engine) -> None:
    early = prompt()
    assert engine.cached_tokens(early) == 0
    url = f"http://127.0.0.1:{engine.port}"
    worker_id = worker_id_of(url)
    with RunningService("--discover", f"url:{url}") as service:

        def is_registered() -> bool:
            rows = service.get("/workers")[1]
            return [row["lifecycle"] for row in rows] == ["schedulable"]

        wait_until(is_registered, f"it is found: {json.dumps(service.get('/discovery')[1])}")
        (row,) = service.get("/workers")[1]
        assert (row["worker_id"], row["model_name"]) == (worker_id, MODEL)
        assert (row["block_size"], row["total_kv_blocks"]) == (BLOCK_SIZE, CAPACITY)

        def known(tokens: list[int]) -> int:
            body = {"model_name": MODEL, "token_ids": tokens}
            return int(service.post("/overlap_scores", body)[1]["workers"][0]["device_blocks"])

        def both_are_known() -> bool:
            engine.cached_tokens(later)  # what was missed before shows with a live batch
            return known(early) == known(later) == BLOCKS

        later = prompt()
        wait_until(both_are_known, "the index has what the engine holds")
        assert engine.cached_tokens(early) == CACHED
