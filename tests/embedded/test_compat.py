"""`lean_selector.compat.install()`: what a program that imports Dynamo's class finds."""

from pathlib import Path

from tests.embedded.services import printed_by, worker

ASK = """
import asyncio, importlib.util
from dynamo.llm import SelectionService
from dynamo._core import SelectionCacheConfig, SelectionServiceError
import lean_selector
async def main():
    service = SelectionService(indexer_threads=4)
    await service.upsert_worker({worker!r})
    selection = await service.select({{"token_ids": [1]}})
    print(SelectionService.__module__, selection["dp_rank"])
    await service.shutdown_async()
asyncio.run(main())
print(SelectionServiceError is lean_selector.SelectionServiceError)
print(SelectionCacheConfig(ttl_secs=1.0).ttl_secs)
print(importlib.util.find_spec("dynamo.llm") is not None)
try:
    from dynamo.llm import KvRouter
except ImportError as error:
    print("KvRouter" in str(error))
"""


def installed() -> str:
    return "from lean_selector import compat\nprint(compat.install())\n"


def test_the_class_of_this_process_is_found_and_what_belongs_to_it() -> None:
    """Other names are missing. It may be installed twice."""
    program = installed() + installed() + ASK.format(worker=worker())
    said = ["True", "True", "lean_selector.embedded.service 0", "True", "1.0", "True", "True"]
    assert printed_by(program).split("\n") == said


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    program = installed() + "import sys, dynamo.llm\nprint({'msgspec', 'zmq'} & set(sys.modules))"
    assert printed_by(program) == "True\nset()"


def test_where_dynamo_is_installed_nothing_changes(tmp_path: Path) -> None:
    package = tmp_path / "dynamo" / "llm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("SelectionService = 'theirs'\n")
    program = installed() + "from dynamo.llm import SelectionService\nprint(SelectionService)"
    assert printed_by(program, path=tmp_path) == "False\ntheirs"
