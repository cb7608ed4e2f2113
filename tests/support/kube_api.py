"""An API server of Kubernetes as far as EndpointSlices go: real HTTPS, lists and faults.

Answers in the forms that a real one records, also 401 for another token.
"""

import json
import ssl
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from tests.support.threaded_server import ThreadedServer, send

NAMESPACE, SERVICE = "serving", "vllm"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
SERVICE_LABEL = "kubernetes.io/service-name"


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
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {SERVICE_LABEL: service},
        },
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
    """The slices of one namespace, by service. Every change gets a resource version."""

    def __init__(self, context: ssl.SSLContext | None = None, token: str = "secret") -> None:
        self.token = token
        self.fails_with: int | None = None  # every request is answered so
        self._lock = threading.Lock()
        self._version = 100
        self._slices: dict[str, dict[str, Any]] = {}
        self._server = ThreadedServer(self._answer, context=context)
        self.url = self._server.url

    def put(self, each: dict[str, Any]) -> None:
        with self._lock:
            self._version += 1
            self._slices[each["metadata"]["name"]] = each

    def delete(self, name: str) -> None:
        with self._lock:
            self._version += 1
            del self._slices[name]

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if handler.headers.get("authorization") != f"Bearer {self.token}":
            _told(handler, 401, {"kind": "Status", "code": 401, "message": "Unauthorized"})
        elif self.fails_with is not None:
            _told(handler, self.fails_with, {"kind": "Status", "message": "on purpose"})
        elif url.path != PATH:
            _told(handler, 404, {"kind": "Status", "code": 404})
        else:
            label, _, service = query["labelSelector"].partition("=")
            assert label == SERVICE_LABEL
            with self._lock:
                items = [
                    each
                    for _, each in sorted(self._slices.items())
                    if each["metadata"]["labels"][SERVICE_LABEL] == service
                ]
                metadata = {"resourceVersion": str(self._version)}
            _told(handler, 200, {"kind": "EndpointSliceList", "metadata": metadata, "items": items})


def _told(handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
    send(handler, status, json.dumps(body).encode())
