"""Envoy's own classes of ext_proc's messages, as `pb`. Where they cannot be installed, who imports
this is skipped."""

import importlib
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from loadtest.reference import NotInstalled, kept, pip

# Beside Envoy's messages it has an old copy of OpenTelemetry's, which would overwrite that of its
# exporter. So it is no package of the tests' own environment. It needs protobuf, which that has.
PACKAGE = "xds-protos==1.85.0"


def _install(folder: Path) -> None:
    pip(Path(sys.executable), "--no-deps", "--upgrade", "--target", str(folder), PACKAGE)
    shutil.rmtree(folder / "opentelemetry")
    (folder / "google" / "__init__.py").unlink()  # it would hide other packages' parts of google


try:
    home = kept(PACKAGE.replace("==", "-"), _install)
except NotInstalled as error:
    pytest.skip(str(error), allow_module_level=True)

with suppress(ImportError):  # the package with Envoy itself, where there is one, has this name too
    importlib.import_module("envoy").__path__.append(str(home / "envoy"))
sys.path.append(str(home))

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb  # noqa: E402 - it has a home now

__all__ = ["pb"]
