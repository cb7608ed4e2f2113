"""Where the reference comes from: a virtual environment of its own, made once and kept.

Both the load tests and the tests that hold the service against the reference ask here.
"""

import fcntl
import os
import subprocess
import sys
import venv
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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lean-selector"
    home = cache / f"reference-{version}"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"reference-{version}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once install it once
        if not (home / "installed").exists():
            print(f"installing {PACKAGE} {version} into {home}", file=sys.stderr, flush=True)
            _install(version, home)
            (home / "installed").touch()
    return home / "bin" / "python"


def _install(version: str, home: Path) -> None:
    venv.create(home, with_pip=True, clear=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    result = subprocess.run(
        [*pip, f"{PACKAGE}=={version}"], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise NotInstalled(f"{PACKAGE} {version} does not install: {result.stderr[-300:]}")
