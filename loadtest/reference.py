"""Packages in folders of their own, made once and kept: the reference, and Envoy's messages.

Both the load tests and the tests that hold the service against the reference ask here.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

PACKAGE = "ai-dynamo-runtime"
# Beside Envoy's messages it has an old copy of OpenTelemetry's, which would overwrite that of its
# exporter. So it is no package of the tests' own environment.
ENVOY_MESSAGES = "xds-protos==1.85.0"


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
        _pip(home / "bin" / "python", f"{PACKAGE}=={version}")

    return _kept(f"reference-{version}", install) / "bin" / "python"


def envoy_messages() -> Path:
    """A folder for `sys.path` with Envoy's messages, installed now if need be. Raises NotInstalled.
    It needs protobuf, which the environment has."""

    def install(home: Path) -> None:
        _pip(Path(sys.executable), "--no-deps", "--upgrade", "--target", str(home), ENVOY_MESSAGES)
        shutil.rmtree(home / "opentelemetry")
        (home / "google" / "__init__.py").unlink()  # it would hide other packages' parts of google

    return _kept(ENVOY_MESSAGES.replace("==", "-"), install)


def _kept(name: str, install: Callable[[Path], None]) -> Path:
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


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise NotInstalled(f"{arguments[-1]} does not install: {result.stderr[-300:]}")
