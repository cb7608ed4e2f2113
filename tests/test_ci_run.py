"""Continuous integration where a program that some tests need cannot be installed: it goes on."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import NOT_INSTALLED, program, python_program

ROOT = Path(__file__).parent.parent
TOOLS = ("bash", "dirname", "grep", "id", "ls", "wc")
SAYS = f'#!/bin/sh\necho "{NOT_INSTALLED}=${NOT_INSTALLED}"\n'


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(folder: Path, apt_get: str) -> subprocess.CompletedProcess[str]:
    """`.ci/run` in a checkout whose steps do nothing but the last, which says what it was told, on
    a machine that has none of the programs, and an `apt-get` that does what is given."""
    found = folder / "bin"
    for tool in TOOLS:
        found.mkdir(exist_ok=True)
        (found / tool).symlink_to(str(shutil.which(tool)))
    executable(found / "apt-get", f"#!/bin/sh\n{apt_get}\n")
    executable(found / "sudo", '#!/bin/sh\nexec "$@"\n')
    executable(found / "python3.11", "#!/bin/sh\n")
    for step in (".venv/bin/pip", ".ci/check", ".ci/size"):
        executable(folder / step, "#!/bin/sh\n")
    executable(folder / ".ci/side_by_side.py", SAYS)
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    environment = {name: value for name, value in os.environ.items() if name != NOT_INSTALLED}
    return subprocess.run(
        [folder / ".ci/run"],
        env={**environment, "PATH": str(found)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_programs_that_cannot_be_installed_are_told_of_and_the_tests_run(tmp_path: Path) -> None:
    done = run(tmp_path, "echo 'E: Unable to locate package nginx' >&2; exit 100")
    assert done.returncode == 0, done.stderr
    assert "E: Unable to locate package nginx" in done.stderr
    said, told = done.stdout.splitlines()
    assert said.startswith("== apt-get could not install ")
    assert told == f"{NOT_INSTALLED}=1"


def test_programs_that_were_installed_are_expected(tmp_path: Path) -> None:
    done = run(tmp_path, "exit 0")
    assert (done.returncode, done.stdout) == (0, f"{NOT_INSTALLED}=\n")


def test_a_program_that_is_missing_fails_in_ci_unless_it_could_not_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.delenv(NOT_INSTALLED, raising=False)
    with pytest.raises(pytest.fail.Exception, match="no-such-program is missing"):
        program("no-such-program", "nothing")
    monkeypatch.setenv(NOT_INSTALLED, "1")
    with pytest.raises(pytest.skip.Exception, match="missing: apt-get install nothing"):
        program("no-such-program", "nothing")
    # What the extra [test] brings was installed all the same.
    with pytest.raises(pytest.fail.Exception, match="missing: pip install nothing"):
        python_program("no-such-program", "nothing")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="missing: pip install nothing"):
        python_program("no-such-program", "nothing")
