"""How the selector can be told to read gateways' access logs.

Rows of the table of options, and what is made of them. What they mean is read by what is imported
only when one is given.
"""

import argparse
import importlib
from collections.abc import Mapping
from typing import Any

from lean_selector.process.options import Option


def _read(reader: str) -> Any:
    def read(value: str) -> object:
        places = importlib.import_module("lean_selector.access_logs.places")
        return getattr(places, reader)(value)

    return read


ACCESS_LOG_OPTIONS = (
    Option(
        "--lifecycle-from",
        _read("places_of"),
        [],
        "free reservations by the lines of gateways' access logs: syslog:HOST:PORT or "
        "unixgram:PATH; may be repeated",
        metavar="WHERE",
        repeats=True,
    ),
    Option(
        "--lifecycle-allow",
        _read("networks_of"),
        [],
        "networks that may write there besides loopback, such as 10.0.0.0/8; may be repeated",
        metavar="CIDR",
        repeats=True,
    ),
)


def access_logs_of(
    parser: argparse.ArgumentParser, values: Mapping[str, object]
) -> dict[str, object] | None:
    """What AccessLogConfig is made of; None: no access logs are read."""
    places, allowed = values["lifecycle_from"], values["lifecycle_allow"]
    if not places:
        if allowed:
            parser.error("--lifecycle-allow requires --lifecycle-from")
        return None
    return {"places": places, "allowed": allowed}
