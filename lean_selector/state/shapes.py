"""The shapes of the files of a state directory."""

from typing import Annotated, Literal

import msgspec

from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.wire.discovery_states import KeptWorker

_U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Id = Annotated[int, msgspec.Meta(ge=0)]


class Stamp(msgspec.Struct, frozen=True):
    """A moment, by two clocks: the one on the wall, which may be set, and the one since the boot,
    which counts suspensions and means nothing after another boot."""

    wall_s: float  # since 1970
    boot_s: float
    boot_id: str  # empty where the system has none


class PartitionRow(msgspec.Struct, frozen=True):
    """A partition whose block size is fixed, and the workers that fix it."""

    model_name: str
    tenant_id: str
    block_size: _U32
    is_eagle: bool
    members: list[_Id]


class ThresholdRow(msgspec.Struct, frozen=True):
    """What a model and tenant was given."""

    model_name: str
    tenant_id: str
    threshold: BusyThreshold


class CatalogHead(msgspec.Struct, frozen=True):
    """What a catalog of any release has."""

    version: int


class CatalogFile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but what lives: the file `catalog`. A worker is a WorkerSpec in the file of a
    selector, a WorkerRow in that of a slot tracker."""

    version: Literal[1]
    service: Literal["selector", "slot_tracker"]
    partitions: list[PartitionRow] = []
    thresholds: list[ThresholdRow] = []
    found: list[KeptWorker] = []
    peers_added: list[str] = []  # over HTTP, beside those of the flags
    peers_removed: list[str] = []  # over HTTP, of those of the flags
    workers: list[msgspec.Raw] = []
