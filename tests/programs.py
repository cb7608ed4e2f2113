"""Programs that some tests hold the service against, and that no Python package brings."""

import os
import shutil

import pytest

# Servers lie where only root's PATH looks.
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))


def program(name: str, package: str) -> str:
    """Its path. Where it is missing, CI fails, and a developer is told what to install."""
    path = shutil.which(name, path=_PATH)
    if path is None:
        message = f"{name} is missing: apt-get install {package}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path
