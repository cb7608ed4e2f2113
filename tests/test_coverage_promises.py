"""What `.ci/coverage` makes of coverage's data: which promise is broken, and where."""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "coverage"


def script() -> Any:
    loader = SourceFileLoader("coverage_promises", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def file(missing_lines: list[int], missing_branches: list[list[int]]) -> dict[str, Any]:
    lines, branches = 10 - len(missing_lines), 4 - len(missing_branches)
    return {
        "missing_lines": missing_lines,
        "missing_branches": missing_branches,
        "summary": {
            "covered_lines": lines,
            "num_statements": 10,
            "covered_branches": branches,
            "num_branches": 4,
        },
    }


def told(percent: float, **files: dict[str, Any]) -> dict[str, Any]:
    return {
        "totals": {"percent_covered": percent},
        "files": {f"lean_selector/{name}.py": each for name, each in files.items()},
    }


def broken(percent: float, *, shows_missing: bool = True, **files: dict[str, Any]) -> list[str]:
    module = script()
    module.PURE = {"core": ["lean_selector/core*"]}
    found: list[str] = module.judged(told(percent, **files), shows_missing=shows_missing)
    return found


def test_promises_that_are_kept_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert broken(95.0, core=file([], []), gateway=file([3], [])) == []
    assert capsys.readouterr().out.splitlines() == [
        "== coverage of lean_selector, lines and branches: 95.00 % (at least 95 %)",
        "== of its pure rooms, core: 100.00 % (all of it)",
    ]


def test_less_than_the_floor_is_a_broken_promise() -> None:
    assert broken(94.99, core=file([], [])) == ["94.99 % of all is less than 95 %"]


def test_a_line_or_a_branch_that_a_pure_room_lacks_is_told_where_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lacking = file([7], [[3, 5], [4, -1]])
    assert broken(99.0, core=lacking) == ["78.57 % of the pure rooms is less than 99.9 %"]
    assert "lacks: core: lean_selector/core.py: 7, 3->5, 4->-1\n" in capsys.readouterr().out
    broken(99.0, core=lacking, shows_missing=False)
    assert "lacks: core: lean_selector/core.py: see --missing\n" in capsys.readouterr().out


def test_what_a_killed_process_took_along_is_told_and_forgiven(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole: dict[str, Any] = {f"core{number}": file([], []) for number in range(99)}
    assert broken(99.0, core=file([7], []), **whole) == []
    assert "lacks: core: lean_selector/core.py: 7\n" in capsys.readouterr().out


def test_a_room_that_is_not_in_the_data_is_not_taken_for_covered() -> None:
    told_first = broken(99.0, gateway=file([], []))[0]
    assert told_first == "core: lean_selector/core* is not in the data"


def test_every_pattern_names_files_that_there_are() -> None:
    root = SCRIPT.parents[1]
    if not (root / "lean_selector").exists():
        pytest.skip("the sources are not beside the tests: they are tested compiled")
    patterns = [each for patterns in script().PURE.values() for each in patterns]
    assert [each for each in patterns if not list(root.glob(each))] == []
