"""The Python example of the page on Ray, run as printed on a small cluster, if Ray is installed."""

import tempfile
from pathlib import Path

import pytest

from tests.documents.pages import python_example
from tests.ray.ray_programs import needs_ray, output_of

HOOK = python_example("worker_process_setup_hook")
RAY_EXAMPLES = [HOOK]
SMALL = "num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False"


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
    assert "lean_selector.embedded.service" in run(HOOK, SEEN).split()
