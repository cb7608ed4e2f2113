"""The manifests of Kubernetes: valid by its schemas, closed to others, and run as they stand.

Their commands start as processes here, beside an API server that speaks as the real one does.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator

from loadtest.child_service import ChildService, asked, plain_environment
from tests.deploy.recipe_commands import (
    MANIFESTS,
    command_of,
    configured,
    containers,
    documents,
    is_ours,
    pod_of,
)
from tests.support.certificates import Authority
from tests.support.fake_engine import FakeEngine
from tests.support.kube_api import KubeApi, slice_of
from tests.support.openai_worker import MODEL, OpenAiWorker
from tests.support.own_network import own_network
from tests.support.prometheus_tools import parsed, scrape, value
from tests.support.running_service import DEADLINE_S, RunningService, free_port, wait_until


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """The schema of an object without other fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


# From 1.29 on native sidecars are there unless switched off.
VERSIONS = ["1.29", kubernetes_validate.latest_version()]
OTHERS = {"ScaledObject", "InferencePool", "HTTPRoute"}  # of others than Kubernetes; see below
RESOURCES = [
    pytest.param(resource, id=f"{name}: {resource['kind']} {resource['metadata']['name']}")
    for name in MANIFESTS
    for resource in documents(name)
    if resource["kind"] not in OTHERS
]
PODS = [
    pytest.param(resource, id=f"{name}: {resource['metadata']['name']}")
    for name in MANIFESTS
    for resource in documents(name)
    if "template" in resource.get("spec", {})
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("resource", RESOURCES)
def test_a_resource_is_what_its_schema_says(resource: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(resource, version, strict=True)


def test_both_ways_to_scale_are_the_same() -> None:
    autoscaler, scaled = (each["spec"] for each in documents("kubernetes/autoscaling.yaml"))
    (metric,), (trigger,) = autoscaler["metrics"], scaled["triggers"]
    external, asked = metric["external"], trigger["metadata"]
    assert scaled["scaleTargetRef"]["name"] == autoscaler["scaleTargetRef"]["name"]
    for name in ("minReplica", "maxReplica"):
        assert scaled[f"{name}Count"] == autoscaler[f"{name}s"]
    assert (external["target"]["type"], trigger["metricType"]) == ("Value", "Value")
    assert external["target"]["value"] == f"{1000 * float(asked['threshold']):.0f}m"
    (model,) = external["metric"]["selector"]["matchLabels"].values()
    assert asked["query"] == f'max({external["metric"]["name"]}{{model="{model}"}})'


# What the reference of the Inference Extension says of an InferencePool (v1), and the Gateway API's
# of an HTTPRoute, as far as these resources go.
NAME = {"type": "string", "minLength": 1, "maxLength": 253}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
PORT = closed({"number": {"type": "integer", "minimum": 1, "maximum": 65535}}, "number")
POOL = closed(
    {
        "selector": closed({"matchLabels": LABELS}, "matchLabels"),
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": PORT},
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "endpointPickerRef": closed(
            {
                "group": {"type": "string"},
                "kind": NAME,
                "name": NAME,
                "port": PORT,
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
            "name",
            "port",  # of a Service
        ),
    },
    "selector",
    "targetPorts",
    "endpointPickerRef",
)
REFERENCE = closed({"group": {"type": "string"}, "kind": NAME, "name": NAME}, "name")
MATCH = closed({"type": {"enum": ["Exact", "PathPrefix"]}, "value": {"pattern": "^/"}}, "value")
DURATION = {"pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
RULE = closed(
    {
        "matches": {"type": "array", "items": closed({"path": MATCH}, "path")},
        "backendRefs": {"type": "array", "items": REFERENCE},
        "timeouts": closed({"request": DURATION, "backendRequest": DURATION}),
    }
)
ROUTE = closed(
    {
        "parentRefs": {"type": "array", "items": REFERENCE},
        "rules": {"type": "array", "items": RULE},
    },
    "parentRefs",
)
EPP = "kubernetes/inferencepool.yaml"


@pytest.mark.parametrize(
    ("kind", "version", "schema"),
    [
        ("InferencePool", "inference.networking.k8s.io/v1", POOL),
        ("HTTPRoute", "gateway.networking.k8s.io/v1", ROUTE),
    ],
)
def test_a_pool_and_its_route_are_what_their_references_say(
    kind: str, version: str, schema: dict[str, Any]
) -> None:
    (resource,) = (each for each in documents(EPP) if each["kind"] == kind)
    assert resource["apiVersion"] == version
    Draft202012Validator(schema).validate(resource["spec"])


def test_the_pool_names_the_picker_and_the_pickers_find_its_pods() -> None:
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents(EPP)}
    pool = found["InferencePool", "vllm"]["spec"]
    (container,) = containers(EPP)
    picker = pool["endpointPickerRef"]
    ports = {port["port"]: port for port in found["Service", picker["name"]]["spec"]["ports"]}
    asked = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert asked[ports[picker["port"]["number"]]["targetPort"]] == 9002
    assert configured(container["args"]).picker.port == 9002
    assert container["readinessProbe"]["grpc"]["port"] == 9002
    engines = found["Service", "vllm"]["spec"]
    assert engines["selector"] == pool["selector"]["matchLabels"]
    assert [port["port"] for port in engines["ports"]] == [
        port["number"] for port in pool["targetPorts"]
    ]
    assert "--discover=kubernetes:serving/vllm" in container["args"]
    (rule,) = found["HTTPRoute", "vllm"]["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == "vllm"
    (drains,) = (arg for arg in container["args"] if arg.startswith("--drain-secs="))
    grace = pod_of(found["Deployment", picker["name"]])["terminationGracePeriodSeconds"]
    assert grace > int(drains.partition("=")[2])


# -- what they may ---------------------------------------------------------------------------------


@pytest.mark.parametrize("resource", PODS)
def test_a_pod_has_no_more_rights_than_it_needs(resource: dict[str, Any]) -> None:
    """The standard of pods that Kubernetes calls restricted, and a read-only file system."""
    pod = pod_of(resource)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        if not is_ours(container):
            continue
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}


# -- what runs -------------------------------------------------------------------------------------

QUICK = (
    *("--discover-interval-secs", "0.05"),
    *("--discover-grace-secs", "0.1"),
    *("--discover-refresh-secs", "0.1"),
)


class Cluster:
    """An API server with the services of a manifest, and what a pod finds in its own files."""

    def __init__(self, api: KubeApi, authority: Authority, folder: Path) -> None:
        self.api = api
        (folder / "ca.crt").write_bytes(authority.pem)
        (folder / "token").write_text(api.token)
        self.flags = (
            *("--kubernetes-api", api.url),
            *("--kubernetes-token-file", str(folder / "token")),
            *("--kubernetes-ca-file", str(folder / "ca.crt")),
        )

    def start(self, service: str, port: int, name: str) -> None:
        """A pod on this machine gets ready behind a service."""
        at = f"{service}-{port}"
        self.api.put(slice_of(at, ["127.0.0.1"], port=port, port_name=name, service=service))

    def end(self, service: str, port: int) -> None:
        self.api.delete(f"{service}-{port}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    authority = Authority()
    with KubeApi(authority.server("127.0.0.1")) as api:
        yield Cluster(api, authority, tmp_path)


def replica(cluster: Cluster, other: int | None) -> tuple[RunningService, int]:
    """The container of `replicas.yaml`, on ports of its own; `other` is the HTTP port of a ready
    one."""
    (container,) = containers("kubernetes/replicas.yaml")
    words = command_of(container)[1:]
    sync = free_port()
    ready = f"http://127.0.0.1:{free_port() if other is None else other}"
    placed = [
        word.replace("$(POD_IP)", "127.0.0.1")
        .replace("9092", str(sync))
        .replace("http://lean-selector.serving:8092", ready)
        for word in words
    ]
    assert "--port=8092" in placed
    placed.remove("--port=8092")
    at = () if other is None else ("--replica-sync-discover-http-port", str(other))
    return RunningService(*placed, *QUICK, *cluster.flags, *at), sync


def test_replicas_find_the_engines_and_each_other_and_share_what_runs(cluster: Cluster) -> None:
    peers = "lean-selector-replicas"
    with ExitStack() as running:
        engines = [running.enter_context(FakeEngine()) for _ in range(2)]
        for engine in engines:
            cluster.start("vllm", engine.port, "http")
        first, first_sync = replica(cluster, None)
        running.enter_context(first)
        cluster.start(peers, first_sync, "replica-sync")

        def is_ready(service: RunningService) -> bool:
            return bool(service.get("/ready")[1]["schedulable_workers"] == len(engines))

        wait_until(lambda: is_ready(first), "both engines can be chosen")
        body = {"model_name": "m", "token_ids": list(range(64)), "reservation_id": "held"}
        assert first.post("/select_and_reserve", body)[0] == 200

        second, second_sync = replica(cluster, first.port)
        running.enter_context(second)
        cluster.start(peers, second_sync, "replica-sync")
        wait_until(lambda: is_ready(second), "the second knows them too")
        wait_until(lambda: second.active() == 1, "what the first holds is held by the second")
        assert second.request("DELETE", "/reservations/held")[0] == 200
        wait_until(lambda: first.active() == 0, "what the second frees is free at the first")
        cluster.end(peers, first_sync)
        wait_until(lambda: second.get("/replica_sync/peers")[1] == [], "who went is no peer")


@pytest.fixture
def pod_network() -> Iterator[None]:
    """The ports of a pod are its own."""
    with own_network():
        yield


@pytest.mark.usefixtures("pod_network")
def test_a_gateway_serves_requests_with_the_selector_in_it(cluster: Cluster) -> None:
    """On the ports that it has there."""
    (container,) = containers("kubernetes/gateway.yaml")
    words = [word.replace("$(POD_IP)", "127.0.0.1") for word in command_of(container)[1:]]
    command = [sys.executable, "-m", "lean_selector", *words, *QUICK, *cluster.flags]
    with ExitStack() as running:
        workers = [running.enter_context(OpenAiWorker()) for _ in range(2)]
        for worker in workers:
            cluster.start("vllm", worker.port, "http")
        gateway = ChildService(command, 8080, env=plain_environment())
        running.callback(gateway.stop, 15, DEADLINE_S)

        def told(path: str) -> Any:
            assert gateway.process.poll() is None, gateway.log()
            try:
                return json.loads(asked(8092, "GET", path)[1])
            except OSError:
                return {}

        wait_until(
            lambda: bool(told("/ready").get("schedulable_workers") == 2),
            "both engines can be chosen",
        )
        chat = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        body, headers = json.dumps(chat).encode(), {"content-type": "application/json"}
        assert gateway.request("POST", "/v1/chat/completions", body, headers)[0] == 200
        samples = parsed(scrape(8092))
        assert value(samples, "lean_selector_gateway_answers_total", status="200") > 0
        assert not samples.get("lean_selector_gateway_unrouted_total"), "it was placed"
        wait_until(
            lambda: all(
                rank["active_requests"] == 0 for row in told("/loads") for rank in row["loads"]
            ),
            "its end is told",
        )
