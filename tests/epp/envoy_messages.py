"""Envoy's own classes of ext_proc's messages, as `pb`. Where they cannot be installed, who imports
this is skipped."""

import importlib
import sys
from contextlib import suppress

import pytest

from loadtest.reference import NotInstalled, envoy_messages

try:
    home = envoy_messages()
except NotInstalled as error:
    pytest.skip(str(error), allow_module_level=True)

with suppress(ImportError):  # the package with Envoy itself, where there is one, has this name too
    importlib.import_module("envoy").__path__.append(str(home / "envoy"))
sys.path.append(str(home))

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

__all__ = ["pb"]
