"""What `lean-slot-tracker` can be told, as a table of options, and the struct made of it."""

import argparse
from collections.abc import Mapping

import msgspec

from lean_selector.process.discovery_config import AccessFiles, FinderConfig
from lean_selector.process.discovery_options import finder_of
from lean_selector.process.endpoint_options import ALLOW_OPTION, check_peer_flags
from lean_selector.process.options import resolve
from lean_selector.process.peer_access_options import PEER_ACCESS_OPTIONS, peer_access_of
from lean_selector.process.service_options import (
    EXPIRY_OPTION,
    LISTEN_OPTIONS,
    REPLICA_OPTIONS,
    Listen,
    ReplicaConfig,
    listen_of,
    port_option,
    replica_of,
)
from lean_selector.process.state_config import StateConfig
from lean_selector.process.state_options import STATE_OPTIONS, state_of

SLOT_TRACKER_OPTIONS = (
    port_option(8091),
    *LISTEN_OPTIONS,
    *STATE_OPTIONS,
    *REPLICA_OPTIONS,
    *PEER_ACCESS_OPTIONS,
    ALLOW_OPTION,
    EXPIRY_OPTION,
)


class SlotTrackerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `lean-slot-tracker` was told."""

    listen: Listen
    replica: ReplicaConfig | None
    finder: FinderConfig
    peers: AccessFiles
    reservation_expiry_s: float
    allowed_endpoints: list[str]
    state: StateConfig | None = None


def slot_tracker_config(
    parser: argparse.ArgumentParser, args: argparse.Namespace, environ: Mapping[str, str]
) -> SlotTrackerConfig:
    values = resolve(parser, SLOT_TRACKER_OPTIONS, args, environ)
    check_peer_flags(parser, values)
    return msgspec.convert(
        {
            "listen": listen_of(parser, values),
            "replica": replica_of(parser, values),
            "finder": finder_of(values),
            "peers": peer_access_of(parser, values),
            "reservation_expiry_s": values["reservation_expiry_secs"],
            "allowed_endpoints": values["allow_endpoint"],
            "state": state_of(values),
        },
        SlotTrackerConfig,
    )
