"""The scripts of continuous integration: coverage and lowest versions."""

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


# -- the coverage that is promised -----------------------------------------------------------------


def covered(missing_lines: list[int], missing_branches: list[list[int]]) -> dict[str, Any]:
    """A file of ten lines and four branches, as coverage tells it."""
    summary = {
        "covered_lines": 10 - len(missing_lines),
        "num_statements": 10,
        "covered_branches": 4 - len(missing_branches),
        "num_branches": 4,
    }
    missing = {"missing_lines": missing_lines, "missing_branches": missing_branches}
    return {**missing, "summary": summary}


WHOLE = covered([], [])
MANY = {f"core{number}": WHOLE for number in range(99)}


@pytest.mark.parametrize(
    ("percent", "files", "broken", "lacks"),
    [
        (95.0, {"core": WHOLE, "gateway": covered([3], [])}, [], ""),
        (94.99, {"core": WHOLE}, ["94.99 % of all is less than 95 %"], ""),
        (
            99.0,
            {"core": covered([7], [[3, 5], [4, -1]])},
            ["78.57 % of the pure rooms is less than 99.9 %"],
            "lacks: core: lean_selector/core.py: 7, 3->5, 4->-1\n",
        ),
        pytest.param(
            *(99.0, {"core": covered([7], []), **MANY}, []),
            "lacks: core: lean_selector/core.py: 7\n",
            id="what a killed process took along",
        ),
        (99.0, {"gateway": WHOLE}, ["core: lean_selector/core* is not in the data"], ""),
    ],
)
def test_a_promise_of_coverage_that_is_broken_is_told_where(
    percent: float,
    files: dict[str, Any],
    broken: list[str],
    lacks: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = script("coverage")
    module.PURE = {"core": ["lean_selector/core*"]}
    told = {
        "totals": {"percent_covered": percent},
        "files": {f"lean_selector/{name}.py": each for name, each in files.items()},
    }
    assert module.judged(told, shows_missing=True)[: len(broken) or None] == broken
    assert lacks in capsys.readouterr().out


def test_every_pure_room_names_files_that_there_are() -> None:
    if not (ROOT / "lean_selector").exists():
        pytest.skip("the sources are not beside the tests: they are tested compiled")
    patterns = [each for patterns in script("coverage").PURE.values() for each in patterns]
    assert [each for each in patterns if not list(ROOT.glob(each))] == []


# -- the lowest versions of the dependencies -------------------------------------------------------


def test_every_dependency_of_the_project_states_its_lower_bound() -> None:
    found = script("lowest_versions.py").lowest(ROOT / "setup.cfg")
    assert {"uvloop", "httptools", "pyzmq", "msgspec", "xxhash", "httpx", "pysimdjson"} <= set(
        found
    )
