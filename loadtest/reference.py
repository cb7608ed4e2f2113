"""Packages in folders of their own, made once and kept, such as the reference.

Both the load tests and the tests that hold the service against the reference ask here.
"""

import fcntl
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

PACKAGE = "ai-dynamo-runtime"


class NotInstalled(Exception):
    """This version cannot be had here. A readable line."""


def interpreter(version: str) -> Path:
    """A python that can run `-m dynamo.select_service` of this version, installed now if need be.

    `LEAN_SELECTOR_REFERENCE_131` and its like name one instead. Raises NotInstalled.
    """
    if given := os.environ.get("LEAN_SELECTOR_REFERENCE_" + version.replace(".", "")):
        return Path(given)

    def install(home: Path) -> None:
        venv.create(home, with_pip=True, clear=True)
        pip(home / "bin" / "python", f"{PACKAGE}=={version}")

    return kept(f"reference-{version}", install) / "bin" / "python"


def kept(name: str, install: Callable[[Path], None]) -> Path:
    """The folder of this name, filled now if need be. Raises NotInstalled."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lean-selector"
    home = cache / name
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once install it once
        if not (home / "installed").exists():
            print(f"installing {name} into {home}", file=sys.stderr, flush=True)
            install(home)
            (home / "installed").touch()
    return home


def pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise NotInstalled(f"{arguments[-1]} does not install: {result.stderr[-300:]}")
