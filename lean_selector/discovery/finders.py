"""Finds workers in files that list workers, and workers or peers by their names in DNS."""

import asyncio
import importlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from lean_selector.discovery.particulars import (
    ROLE_LABEL,
    Found,
    FoundEndpoint,
    Particulars,
    Target,
    endpoint_key,
    role_of,
)
from lean_selector.http.trust import WatchedFile

# -- the state of a discovery ----------------------------------------------------------------------

log = logging.getLogger("lean_selector.discovery")

WARN_EVERY_S: Final = 60.0


class Sighting:
    """The state of one target of --discover or --replica-sync-discover. After a failed look-up, the
    target's last result stays in effect until the next success."""

    def __init__(self, name: str) -> None:
        """`name` is the target's text, as given in the flag."""
        self.name: Final = name
        self.count: int | None = None  # size of the last result; None before the first
        self.error: str | None = None
        self.since = time.monotonic()  # when `error` was last set or cleared
        self.failures = 0
        self._warned_at = 0.0

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failing"
        return "starting" if self.count is None else "watching"

    def found(self, count: int) -> None:
        is_news = self.error is not None or self.count is None
        if is_news and not self.name.startswith("url:"):  # a URL always finds itself
            log.info("discovery %s: %d found", self.name, count, extra={"discovery": self.name})
            self.since = time.monotonic()
        self.count = count
        self.error = None

    def failed(self, reason: str) -> None:
        """Records a failed look-up. Logs the first one in a row, then at most one per minute."""
        now = time.monotonic()
        self.failures += 1
        if self.error is None:
            self.since = now
            self._warned_at = 0.0
        self.error = reason
        if not self._warned_at or now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            text = "discovery %s failed: %s"
            if self.count is not None:
                text = "discovery %s failed, its last result stays in use: %s"
            log.warning(text, self.name, reason, extra={"discovery": self.name})


# Called with the found endpoints, each with the uid of the pod there ("" if unknown), and with
# those reported as terminating.
OnEndpoints = Callable[[Mapping[FoundEndpoint, str], Iterable[FoundEndpoint]], None]


# -- files that list workers -----------------------------------------------------------------------


class Registrations(msgspec.Struct, forbid_unknown_fields=True):
    """A file that lists workers: bodies of POST /workers, in which `worker_id` is optional."""

    workers: list[Particulars] | None


class ListedEndpoint(msgspec.Struct):
    """A worker in a file for llm-d's file discovery. Only the fields that we use are declared."""

    address: str
    port: int | str
    labels: dict[str, str] = {}

    def entry(self) -> Particulars:
        """Return endpoint, model (label `model`) and role of the worker. Raises ValueError for a
        bad port and an unknown role."""
        if not str(self.port).isdigit() or not 1 <= int(self.port) <= 0xFFFF:
            raise ValueError(f"`{self.port}` of {self.address} is no port")
        found = FoundEndpoint(self.address, int(self.port))
        model, role = self.labels.get("model"), role_of(self.labels.get(ROLE_LABEL))
        return Particulars(endpoint=found.url, model_name=model, worker_role=role)


class ListedEndpoints(msgspec.Struct):
    """A file for llm-d's file discovery."""

    endpoints: list[ListedEndpoint] | None


MOST_WORKERS: Final = 16_384
MOST_LEVELS: Final = 100  # libyaml uses C stack for each level, without a limit of its own
_TOO_DEEP: Final = "lists and objects are nested too deeply, or within themselves"


def listed_workers(text: bytes, is_yaml: bool) -> Found:
    """Return the workers that a file lists. If any part is invalid, raises ValueError with the
    position, and no worker of the file is used.

    The file is a list of bodies of POST /workers, or an object with such a list in `workers`, or an
    object with a list of llm-d's endpoints in `endpoints`."""
    try:
        return _listed(text, is_yaml)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _listed(text: bytes, is_yaml: bool) -> Found:
    content = _content(text, is_yaml)
    if isinstance(content, list):
        content = {"workers": content}
    if not isinstance(content, dict) or not {"workers", "endpoints"} & content.keys():
        raise ValueError("expected a list of workers, or an object with `workers` or `endpoints`")
    # Convert through JSON, because YAML keys may be numbers, as in maps by rank.
    try:
        again = msgspec.json.encode(content)
    except TypeError:
        raise ValueError(
            "a key is not text: YAML reads on, off, yes, no and ~ without quotes as true, false "
            "and null"
        ) from None
    if "workers" in content:
        entries = msgspec.json.decode(again, type=Registrations).workers or []
    else:
        listed = msgspec.json.decode(again, type=ListedEndpoints).endpoints or []
        entries = [each.entry() for each in listed]
    return Found(_checked(entries))


def _content(text: bytes, is_yaml: bool) -> Any:
    if not is_yaml:
        return msgspec.json.decode(text)
    yaml = importlib.import_module("yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        levels = 0
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.CollectionStartEvent):
                levels += 1
                if levels > MOST_LEVELS:
                    raise ValueError(_TOO_DEEP)
            elif isinstance(event, yaml.CollectionEndEvent):
                levels -= 1
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (AttributeError, LookupError) as error:  # of the parser: value and tag disagree
        raise ValueError(f"a value does not match its tag: {error!r}") from None


def _checked(entries: list[Particulars]) -> tuple[Particulars, ...]:
    if len(entries) > MOST_WORKERS:
        raise ValueError(f"{len(entries)} workers, more than {MOST_WORKERS}")
    endpoints: dict[str, int] = {}
    ids: dict[int, int] = {}
    for at, entry in enumerate(entries):
        if not entry.endpoint:
            raise ValueError(f"worker {at} has no endpoint")
        before = endpoints.setdefault(endpoint_key(entry.endpoint), at)
        if before != at:
            raise ValueError(f"workers {before} and {at} have the same endpoint {entry.endpoint}")
        if entry.worker_id is not None and ids.setdefault(entry.worker_id, at) != at:
            before = ids[entry.worker_id]
            raise ValueError(f"workers {before} and {at} have the same worker_id {entry.worker_id}")
    return tuple(entries)


MOST_BYTES: Final = 16 << 20


@dataclass(eq=False)
class FileFinder:
    """Checks a file periodically, and reads it if it has changed. A file named *.json is JSON, any
    other is YAML. Users must replace the file atomically (rename it into place): a partly written
    file would be an error, or list only a part of the workers."""

    sighting: Sighting
    path: str
    interval_s: float
    on_found: Callable[[Found], None]

    def __post_init__(self) -> None:
        self._file = WatchedFile(self.path, MOST_BYTES)
        self._is_yaml = not self.path.lower().endswith(".json")

    async def run(self) -> None:
        fault: str | None = None
        while True:
            try:
                text, is_new = self._file.read()
                if is_new:
                    fault = None
                    # In a thread, because parsing thousands of workers in YAML takes a second.
                    found = await asyncio.to_thread(listed_workers, text, self._is_yaml)
                    self.sighting.found(len(found.entries))
                    self.on_found(found)
                elif fault is not None:
                    self.sighting.failed(fault)
                elif self.sighting.error is not None:  # the file was missing, and is back unchanged
                    self.sighting.found(self.sighting.count or 0)
            except OSError as error:
                self.sighting.failed(os.strerror(error.errno) if error.errno else str(error))
            except ValueError as error:
                fault = str(error)
                self.sighting.failed(fault)
            except Exception:
                self._file.forget()  # it may have changed
                raise
            await asyncio.sleep(self.interval_s)


# -- DNS -------------------------------------------------------------------------------------------

SocketAddress = tuple[int, tuple[Any, ...] | bytes]
Resolve = Callable[[str, int], Awaitable[list[SocketAddress]]]

MOST_PLACES: Final = 4096


@dataclass(eq=False)
class DnsFinder:
    """Resolves a name to addresses periodically.

    An answer without addresses counts as a failure, like an unknown name, because DNS cannot say
    that there are no workers."""

    sighting: Sighting
    target: Target
    interval_s: float
    resolve: Resolve
    on_endpoints: OnEndpoints

    async def run(self) -> None:
        while True:
            try:
                endpoints = await self._resolve()
            except OSError as error:
                self.sighting.failed(error.strerror or str(error))
            else:
                self.sighting.found(len(endpoints))
                self.on_endpoints(dict.fromkeys(endpoints, ""), ())
            await asyncio.sleep(self.interval_s)

    async def _resolve(self) -> list[FoundEndpoint]:
        port = int(self.target.port or 0)
        addresses = await self.resolve(self.target.name, port)
        # The IPv4 and IPv6 addresses are those of the same workers; IPv4 is used.
        families = {family for family, _ in addresses}
        wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        found = {
            FoundEndpoint(str(address[0]), port, self.target.is_secure)
            for family, address in addresses
            if family == wanted and isinstance(address, tuple)
        }
        if not found:
            raise OSError("the answer has no addresses")
        if len(found) > MOST_PLACES:
            raise OSError(f"the answer names {len(found)}, more than {MOST_PLACES}")
        return sorted(found)
