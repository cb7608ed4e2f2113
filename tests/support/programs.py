"""Programs that some tests hold the service against."""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

# Set by `.ci/run` where apt-get could not install all that is needed.
NOT_INSTALLED = "LEAN_SELECTOR_NOT_INSTALLED"

# Servers lie where only root's PATH looks.
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))


def program(name: str, package: str) -> str:
    """Its path. Where it is missing, CI fails, unless it could not be installed there; a developer
    is told what to install."""
    path = shutil.which(name, path=_PATH)
    could_install = not os.environ.get(NOT_INSTALLED)
    if path is None:
        _missing(f"{name} is missing: apt-get install {package}", could_install)
    return path


def python_program(name: str, package: str) -> str:
    """The same of a program that a Python package of the extra [test] brings."""
    path = shutil.which(name, path=str(Path(sys.executable).parent))
    return _missing(f"{name} is missing: pip install {package}") if path is None else path


def _missing(message: str, could_install: bool = True) -> NoReturn:
    if could_install and os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
