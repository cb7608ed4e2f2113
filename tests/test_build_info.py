"""Which form runs: told of the modules that are really loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

from lean_selector import build_info as form

# A library of two compiled modules, as mypyc builds it, and a package with one of them compiled.
LIBRARY = "init_lean_selector___core___errors = init_lean_selector___core___numbers = None\n"


def test_sources_without_a_library_are_pure() -> None:
    script = f"import sys; sys.modules[{form._LIBRARY!r}] = None; "
    script += "from lean_selector.build_info import form; print(form())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "pure\n"


def test_sources_over_a_compiled_installation_are_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{form._LIBRARY}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, form._LIBRARY, raising=False)
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
