"""An API server of Kubernetes as far as EndpointSlices go: real HTTPS, lists, watches and faults.

Answers in the forms that a real one records: pages with `continue`, watches as chunked lines from a
resource version on, bookmarks, 410 both as a status and as an ERROR event, 401 for another token.
"""

import json
import ssl
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from tests.support.threaded_server import ThreadedServer, send

NAMESPACE, SERVICE = "serving", "vllm"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
SERVICE_LABEL = "kubernetes.io/service-name"
WAIT_S = 0.02


def slice_of(
    name: str,
    addresses: Sequence[str],
    *,
    port: int = 8000,
    port_name: str | None = "http",
    family: str = "IPv4",
    conditions: dict[str, bool] | None = None,
    app_protocol: str | None = None,
    service: str = SERVICE,
    uid: str = "",
) -> dict[str, Any]:
    """One slice, all of whose endpoints are in the same condition."""
    ready = {"ready": True, "serving": True, "terminating": False}
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {SERVICE_LABEL: service}},
        "addressType": family,
        "endpoints": [
            {
                "addresses": [address],
                "conditions": conditions if conditions is not None else ready,
                "nodeName": "node-1",
                "targetRef": {"kind": "Pod", "name": f"vllm-{at}", "uid": uid},
            }
            for at, address in enumerate(addresses)
        ],
        "ports": [
            {
                "name": port_name,
                "protocol": "TCP",
                "port": port,
                **({} if app_protocol is None else {"appProtocol": app_protocol}),
            }
        ],
    }


class KubeApi:
    """The slices of one namespace, by service. Every change gets a resource version, and is told to
    who watches."""

    def __init__(self, context: ssl.SSLContext | None = None, token: str = "secret") -> None:
        self.token = token
        self.lists = 0
        self.watches = 0  # that stand, or stood
        self.requests: list[str] = []
        self.page = 500  # slices, at most, of one answer to a list
        self.fails_with: int | None = None  # every request is answered so
        self._changed = threading.Condition()
        self._version = 100
        self._oldest = 100  # a watch from before this is Gone
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._generation = 0  # watches of an older one are cut off
        self._is_over = False
        self._server = ThreadedServer(self._answer, context=context)
        self.url = self._server.url

    # -- what the test does ------------------------------------------------------------------------

    def put(self, each: dict[str, Any]) -> None:
        name = each["metadata"]["name"]
        self._change("MODIFIED" if name in self._slices else "ADDED", each)

    def delete(self, name: str) -> None:
        self._change("DELETED", self._slices[name])

    def put_unheard(self, each: dict[str, Any]) -> None:
        """Only a list shows it."""
        with self._changed:
            self._version += 1
            self._slices[each["metadata"]["name"]] = self._versioned(each)

    def bookmark(self) -> None:
        """Tells watches how far things are; nothing has changed."""
        with self._changed:
            self._version += 1
            told = {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(self._version)}}
            self._events.append((self._version, {"type": "BOOKMARK", "object": told}))
            self._changed.notify_all()

    def cut_watches(self) -> None:
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def compact(self) -> None:
        """Forgets what has happened: who watches from before is Gone."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._events.clear()

    def forget_everything(self) -> None:
        """From now on every watch is Gone."""
        self._oldest = sys.maxsize
        self.cut_watches()

    def tell_gone(self) -> None:
        """Ends watches as etcd's compaction does: an ERROR event with the code 410."""
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
        with self._changed:
            self._version += 1
            self._events.append((self._version, {"type": "ERROR", "object": status}))
            self._oldest = self._version
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _change(self, kind: str, each: dict[str, Any]) -> None:
        with self._changed:
            self._version += 1
            told = self._versioned(each)
            if kind == "DELETED":
                del self._slices[each["metadata"]["name"]]
            else:
                self._slices[each["metadata"]["name"]] = told
            self._events.append((self._version, {"type": kind, "object": told}))
            self._changed.notify_all()

    def _versioned(self, each: dict[str, Any]) -> dict[str, Any]:
        return {**each, "metadata": {**each["metadata"], "resourceVersion": str(self._version)}}

    # -- what it answers ---------------------------------------------------------------------------

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(handler.path)
        url = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if handler.headers.get("authorization") != f"Bearer {self.token}":
            _told(handler, 401, {"kind": "Status", "code": 401, "message": "Unauthorized"})
        elif self.fails_with is not None:
            _told(handler, self.fails_with, {"kind": "Status", "message": "on purpose"})
        elif url.path != PATH:
            _told(handler, 404, {"kind": "Status", "code": 404})
        elif "watch" in query:
            self._watch(handler, _service_of(query), int(query["resourceVersion"]))
        else:
            self.lists += 1
            self._list(handler, _service_of(query), int(query.get("continue", "0")))

    def _list(self, handler: BaseHTTPRequestHandler, service: str, first: int) -> None:
        with self._changed:
            names = sorted(n for n, each in self._slices.items() if _is_of(each, service))
            shown = [self._slices[name] for name in names[first : first + self.page]]
            following = str(first + self.page) if first + self.page < len(names) else ""
            metadata = {"resourceVersion": str(self._version), "continue": following}
        _told(handler, 200, {"kind": "EndpointSliceList", "metadata": metadata, "items": shown})

    def _watch(self, handler: BaseHTTPRequestHandler, service: str, version: int) -> None:
        if version < self._oldest:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            _told(handler, 410, status)
            return
        handler.send_response(200)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        with self._changed:
            generation = self._generation
            self.watches += 1
        try:
            while True:
                with self._changed:
                    new = [
                        event
                        for at, event in self._events
                        if at > version and _is_of(event["object"], service)
                    ]
                    if not new:
                        if self._is_over or self._generation != generation:
                            break
                        self._changed.wait(WAIT_S)
                        continue
                    version = self._version
                for event in new:
                    line = json.dumps(event).encode() + b"\n"
                    half = len(line) // 2  # as it is cut on the way
                    for part in (line[:half], line[half:]):
                        handler.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        except OSError:
            pass
        handler.close_connection = True


def _told(handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
    send(handler, status, json.dumps(body).encode())


def _service_of(query: dict[str, str]) -> str:
    label, _, service = query["labelSelector"].partition("=")
    assert label == SERVICE_LABEL
    return service


def _is_of(told: dict[str, Any], service: str) -> bool:
    """A slice of the service, or what every watch is told: a bookmark, an error."""
    labels = told.get("metadata", {}).get("labels")
    return labels is None or labels[SERVICE_LABEL] == service
