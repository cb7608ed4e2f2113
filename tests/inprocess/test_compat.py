"""`lean_selector.compat.install()`: what a program that imports Dynamo's class finds."""

from pathlib import Path

from tests.inprocess.services import printed_by, worker

ASK = """
import asyncio
from dynamo.llm import SelectionService
async def main():
    service = SelectionService(indexer_threads=4)
    await service.upsert_worker({worker!r})
    selection = await service.select({{"token_ids": [1]}})
    print(type(service).__mro__[-2].__name__, selection["dp_rank"])
    await service.shutdown_async()
asyncio.run(main())
"""


def installed() -> str:
    return "from lean_selector import compat\nprint(compat.install())\n"


def test_the_class_of_this_process_is_found() -> None:
    program = installed() + ASK.format(worker=worker())
    assert printed_by(program) == "True\nSelectionService 0"


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    program = installed() + "import sys, dynamo.llm\nprint({'msgspec', 'zmq'} & set(sys.modules))"
    assert printed_by(program) == "True\nset()"


def test_the_error_and_the_cache_config_are_found_and_other_names_are_missing() -> None:
    program = (
        installed()
        + """
import importlib.util
from dynamo._core import SelectionCacheConfig, SelectionServiceError
import lean_selector
print(SelectionServiceError is lean_selector.SelectionServiceError)
print(SelectionCacheConfig(ttl_secs=1.0).ttl_secs)
print(importlib.util.find_spec("dynamo.llm") is not None)
try:
    from dynamo.llm import KvRouter
except ImportError as error:
    print("KvRouter" in str(error))
"""
    )
    assert printed_by(program) == "True\nTrue\n1.0\nTrue\nTrue"


def test_where_dynamo_is_installed_nothing_changes(tmp_path: Path) -> None:
    package = tmp_path / "dynamo" / "llm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("SelectionService = 'theirs'\n")
    program = installed() + "from dynamo.llm import SelectionService\nprint(SelectionService)"
    assert printed_by(program, path=tmp_path) == "False\ntheirs"


def test_it_may_be_installed_twice() -> None:
    program = (
        installed()
        + installed()
        + "from dynamo.llm import SelectionService\nprint(SelectionService.__module__)"
    )
    assert printed_by(program) == "True\nTrue\nlean_selector.inprocess.service"
