"""Session fixtures shared by all tests: interpreters that can run the reference services."""

import os
import subprocess
import venv
from pathlib import Path

import pytest

INSTALL_TIMEOUT_S = 600


def _reference(config: pytest.Config, version: str) -> Path:
    """A python that can run `-m dynamo.select_service`: one given, or else made once and kept."""
    variable = "LEAN_SELECTOR_REFERENCE_" + version.replace(".", "")
    if given := os.environ.get(variable):
        return Path(given)
    home = config.cache.mkdir(f"reference-{version}") if config.cache else None
    if home is None:
        pytest.skip(f"no cache directory to install the reference in; set {variable}")
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        venv.create(home, with_pip=True, clear=True)
        installed = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", f"ai-dynamo-runtime=={version}"],
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
        if installed.returncode:
            pytest.skip(f"the reference {version} does not install here: {installed.stderr[-500:]}")
        (home / "installed").touch()
    return python


@pytest.fixture(scope="session")
def reference_131(pytestconfig: pytest.Config) -> Path:
    return _reference(pytestconfig, "1.3.1")


@pytest.fixture(scope="session")
def reference_161(pytestconfig: pytest.Config) -> Path:
    return _reference(pytestconfig, "1.6.1")
