"""The client of the selection service; its API is that of the router in Dynamo's examples.

Requires httpx, which is installed by `pip install "lean-selector[client]"`. KvRouter and
SyncKvRouter choose and reserve workers, and stream from them. errors.py lists the errors."""

try:
    import httpx as httpx
except ImportError as error:
    raise ImportError(
        'lean_selector.client needs httpx: pip install "lean-selector[client]"'
    ) from error

from lean_selector.client.client_settings import Backoff, KvRouterConfig, Timeouts
from lean_selector.client.errors import (
    AlreadyExists,
    ClientClosed,
    ClientError,
    InvalidRequest,
    ModelNotNamed,
    NotFound,
    NoWorkerAvailable,
    OtherEventLoop,
    ServiceRefused,
    ServiceUnreachable,
    WorkerError,
    WorkerRefused,
    WorkerStreamBroken,
    WorkerUnreachable,
    WrongBlockSize,
)
from lean_selector.client.placements import Placement, TokenStream
from lean_selector.client.router import KvPushRouter, KvRouter
from lean_selector.client.sync_router import SyncKvRouter, SyncPlacement, SyncTokenStream

__all__ = [
    "AlreadyExists",
    "Backoff",
    "ClientClosed",
    "ClientError",
    "InvalidRequest",
    "KvPushRouter",
    "KvRouter",
    "KvRouterConfig",
    "ModelNotNamed",
    "NoWorkerAvailable",
    "NotFound",
    "OtherEventLoop",
    "Placement",
    "ServiceRefused",
    "ServiceUnreachable",
    "SyncKvRouter",
    "SyncPlacement",
    "SyncTokenStream",
    "Timeouts",
    "TokenStream",
    "WorkerError",
    "WorkerRefused",
    "WorkerStreamBroken",
    "WorkerUnreachable",
    "WrongBlockSize",
]
