"""What `lean-slot-tracker` can be told: its rows of the table of options, put together.

Reading values and the order of flag, environment and default are those of `config`.
"""

import argparse
from collections.abc import Mapping

import msgspec

from lean_selector.process.options import Option, integer, resolve
from lean_selector.process.selector_config import (
    EXPIRY_OPTION,
    LISTEN_OPTIONS,
    REPLICA_OPTIONS,
    Listen,
    ReplicaConfig,
    listen_of,
    replica_of,
)

SLOT_TRACKER_OPTIONS = (
    Option("--port", integer(0, 65535), 8091, "HTTP port; 0 takes a free one"),
    *LISTEN_OPTIONS,
    *REPLICA_OPTIONS,
    EXPIRY_OPTION,
)


class SlotTrackerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `lean-slot-tracker` was told."""

    listen: Listen
    replica: ReplicaConfig | None
    reservation_expiry_s: float


def slot_tracker_config(
    parser: argparse.ArgumentParser, args: argparse.Namespace, environ: Mapping[str, str]
) -> SlotTrackerConfig:
    values = resolve(parser, SLOT_TRACKER_OPTIONS, args, environ)
    return msgspec.convert(
        {
            "listen": listen_of(values),
            "replica": replica_of(parser, values),
            "reservation_expiry_s": values["reservation_expiry_secs"],
        },
        SlotTrackerConfig,
    )
