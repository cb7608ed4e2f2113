"""What the compiled run leaves out is about nothing that is compiled."""

import ast
from pathlib import Path

import pytest

from tests.support.one_form import EXCEPT, ONE_FORM, TESTS, is_of_one_form
from tests.test_compiled_modules import COMPILED

# Tests of anything name errors, and blocks by their hashes.
OF_ANYTHING = {"lean_selector.core.errors", "lean_selector.core.hashing"}
LEFT_OUT = sorted(path for path in TESTS.rglob("test_*.py") if is_of_one_form(path))


def imported(path: Path) -> set[str]:
    """Names of modules, and of what is imported from them, which may be modules too."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("name", [*ONE_FORM, *EXCEPT])
def test_every_entry_is_there(name: str) -> None:
    path = TESTS / name
    assert path.is_file() or any(path.rglob("test_*.py"))


@pytest.mark.parametrize("path", LEFT_OUT, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_file_that_is_left_out_imports_what_is_compiled(path: Path) -> None:
    assert imported(path) & set(COMPILED) <= OF_ANYTHING


def test_the_rule_sees_imports_in_every_form(tmp_path: Path) -> None:
    script = tmp_path / "test_x.py"
    script.write_text(
        "import lean_selector.a.b as c\nfrom lean_selector.d import e\ndef f():\n    import g\n"
    )
    expected = {"lean_selector.a.b", "lean_selector.d", "lean_selector.d.e", "g"}
    assert imported(script) == expected


def test_most_tests_run_on_both_forms() -> None:
    every = list(TESTS.rglob("test_*.py"))
    assert {path.parent.name for path in set(every) - set(LEFT_OUT)} >= {
        *("core", "wire", "http", "service", "events", "replicas"),  # what is compiled
        *("conformance", "interop", "properties", "inprocess", "server", "gateway"),
    }
