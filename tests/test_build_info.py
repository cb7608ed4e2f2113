"""Which form runs: told of the modules that are really loaded."""

import subprocess
import sys
from types import ModuleType

import pytest

from lean_selector import build_info as form

COMPILED = ("lean_selector.core.errors", "lean_selector.core.numbers")


def test_sources_without_a_library_are_pure() -> None:
    script = f"import sys; sys.modules[{form._LIBRARY!r}] = None; "
    script += "from lean_selector.build_info import form; print(form())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "pure\n"


def test_sources_over_a_compiled_installation_are_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = ModuleType(form._LIBRARY)  # of two compiled modules, with the names that mypyc gives
    for name in COMPILED:
        setattr(library, "init_" + name.replace(".", "___"), None)
    monkeypatch.setitem(sys.modules, form._LIBRARY, library)
    compiled = {"lean_selector.core.errors"}
    monkeypatch.setattr(form, "_is_compiled", compiled.__contains__)
    assert form.form() == "1 of 2 modules compiled"
    compiled.add("lean_selector.core.numbers")
    assert form.form() == "compiled"
    compiled.clear()
    assert form.form() == "pure"


def test_a_module_is_judged_by_what_was_loaded_of_it_or_would_be() -> None:
    assert not form._is_compiled("lean_selector.build_info")
    assert not form._is_compiled("xml.dom.minidom")  # not loaded
    assert not form._is_compiled("lean_selector.no_such_module")
    assert form._is_compiled("msgspec._core")
