"""Programs that some tests hold the service against."""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

# Servers lie where only root's PATH looks.
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))


def program(name: str, package: str) -> str:
    """Its path. Where it is missing, CI fails, and a developer is told what to install."""
    path = shutil.which(name, path=_PATH)
    return _missing(f"{name} is missing: apt-get install {package}") if path is None else path


def python_program(name: str, package: str) -> str:
    """The same of a program that a Python package of the extra [test] brings."""
    path = shutil.which(name, path=str(Path(sys.executable).parent))
    return _missing(f"{name} is missing: pip install {package}") if path is None else path


def _missing(message: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
