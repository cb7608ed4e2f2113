"""What the compiled run leaves out is about nothing that is compiled."""

import ast
from pathlib import Path

from tests.support.one_form import EXCEPT, ONE_FORM, TESTS, is_of_one_form
from tests.test_compiled_modules import compiled

# Tests of anything name errors, and blocks by their hashes.
OF_ANYTHING = {"lean_selector.core.errors", "lean_selector.core.hashing"}
# Compiled classes have no interpreted subclasses, which the leases of the one are, and take nothing
# else in place of a compiled object, as the placing of the other is.
SUBCLASSING = {TESTS / f"gateway/test_{name}.py" for name in ("passing", "proxied_request")}
LEFT_OUT = sorted({path for path in TESTS.rglob("test_*.py") if is_of_one_form(path)} - SUBCLASSING)


def imported(path: Path) -> set[str]:
    """Names of modules, and of what is imported from them, which may be modules too."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_every_entry_is_there() -> None:
    paths = [TESTS / name for name in (*ONE_FORM, *EXCEPT)]
    assert [path for path in paths if not path.is_file() and not any(path.rglob("test_*.py"))] == []


def test_no_file_that_is_left_out_imports_what_is_compiled() -> None:
    where = set(compiled()) - OF_ANYTHING
    wrong = {str(path): found for path in LEFT_OUT if (found := imported(path) & where)}
    assert wrong == {}
