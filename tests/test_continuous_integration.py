"""The scripts of continuous integration name what there is."""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def script(name: str) -> Any:
    """One of `.ci`, as a module."""
    loader = SourceFileLoader(Path(name).stem, str(ROOT / ".ci" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_pure_room_names_files_that_there_are() -> None:
    if not (ROOT / "lean_selector").exists():
        pytest.skip("the sources are not beside the tests: they are tested compiled")
    patterns = [each for patterns in script("coverage").PURE.values() for each in patterns]
    assert [each for each in patterns if not list(ROOT.glob(each))] == []


def test_every_dependency_of_the_project_states_its_lower_bound() -> None:
    found = script("lowest_versions.py").lowest(ROOT / "setup.cfg")
    assert {"uvloop", "httptools", "pyzmq", "msgspec", "xxhash", "httpx", "pysimdjson"} <= set(
        found
    )
