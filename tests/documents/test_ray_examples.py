"""The Python examples of the page on Ray, run as printed.

Only addresses are changed, and clusters are kept small. What needs Ray runs where it is installed.
"""

import ast
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from lean_selector import RemoteSelectionService
from tests.client.fleet import Fleet
from tests.documents.pages import PYTHON, python_example
from tests.ray.ray_programs import needs_ray, output_of

HOOK_WITH_URL = python_example("LEAN_SELECTOR_URL")
[HOOK] = (each for each in PYTHON if "worker_process_setup_hook" in each and each != HOOK_WITH_URL)
SELECT_THEN_RESERVE = python_example("async def ask(")
RAY_EXAMPLES = [HOOK, HOOK_WITH_URL, SELECT_THEN_RESERVE]
SMALL = "num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False"
PROMPT = list(range(1, 41))


def test_select_then_reserve() -> None:
    names: dict[str, Any] = {}
    exec(
        compile(SELECT_THEN_RESERVE, "<document>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT),
        names,
    )

    async def main(fleet: Fleet) -> None:
        selector = RemoteSelectionService(fleet.endpoint)
        async with httpx.AsyncClient() as http:
            asked = (names["ask"](selector, http, PROMPT) for _ in range(20))
            answers = await asyncio.gather(*asked)
        assert all("data: [DONE]" in answer for answer in answers)
        await selector.shutdown_async()

    with Fleet(2, block_size=16) as fleet:
        asyncio.run(main(fleet))
        assert sum(len(worker.requests) for worker in fleet.workers.values()) == 20
        assert fleet.total() == (0, 0, 0)


def run(*parts: str) -> str:
    """A program with Ray, of these parts."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        program = Path(folder) / "program.py"
        program.write_text("\n".join(parts).replace("ray.init(", f"ray.init({SMALL}, ", 1))
        return output_of([str(program)], Path(folder))


SEEN = """
@ray.remote(num_cpus=0.1)
def seen():
    from dynamo.llm import SelectionService
    return [kind.__module__ for kind in SelectionService.__mro__[:-1]]
print(*ray.get(seen.remote()))
ray.shutdown()
"""


@pytest.mark.ray
@needs_ray
def test_every_process_of_the_cluster_finds_the_class() -> None:
    assert "lean_selector.inprocess.service" in run(HOOK, SEEN).split()
    assert "lean_selector.inprocess.remote" in run(HOOK_WITH_URL, SEEN).split()
