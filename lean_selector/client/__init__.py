"""The client of the selection service; its API is that of the router in Dynamo's examples.

Requires httpx, which is installed by `pip install "lean-selector[client]"`. KvRouter and
SyncKvRouter choose and reserve workers, and stream from them. errors.py lists the errors."""

try:
    import httpx as httpx
except ImportError as error:
    raise ImportError(
        'lean_selector.client needs httpx: pip install "lean-selector[client]"'
    ) from error

from lean_selector.client.client_settings import Backoff as Backoff
from lean_selector.client.client_settings import KvRouterConfig as KvRouterConfig
from lean_selector.client.client_settings import Timeouts as Timeouts
from lean_selector.client.errors import AlreadyExists as AlreadyExists
from lean_selector.client.errors import ClientClosed as ClientClosed
from lean_selector.client.errors import ClientError as ClientError
from lean_selector.client.errors import InvalidRequest as InvalidRequest
from lean_selector.client.errors import ModelNotNamed as ModelNotNamed
from lean_selector.client.errors import NotFound as NotFound
from lean_selector.client.errors import NoWorkerAvailable as NoWorkerAvailable
from lean_selector.client.errors import OtherEventLoop as OtherEventLoop
from lean_selector.client.errors import ServiceRefused as ServiceRefused
from lean_selector.client.errors import ServiceUnreachable as ServiceUnreachable
from lean_selector.client.errors import WorkerError as WorkerError
from lean_selector.client.errors import WorkerRefused as WorkerRefused
from lean_selector.client.errors import WorkerStreamBroken as WorkerStreamBroken
from lean_selector.client.errors import WorkerUnreachable as WorkerUnreachable
from lean_selector.client.errors import WrongBlockSize as WrongBlockSize
from lean_selector.client.placements import Placement as Placement
from lean_selector.client.placements import TokenStream as TokenStream
from lean_selector.client.router import KvPushRouter as KvPushRouter
from lean_selector.client.router import KvRouter as KvRouter
from lean_selector.client.router import RoutingOptions as RoutingOptions
from lean_selector.client.sync_router import SyncKvRouter as SyncKvRouter
from lean_selector.client.sync_router import SyncPlacement as SyncPlacement
from lean_selector.client.sync_router import SyncTokenStream as SyncTokenStream
