"""The files of deploy/, and the commands of ours that they run, as lists of words."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from lean_selector.app.picker_flags import SelectorServiceConfig
from lean_selector.tools import recipes
from tests.support.configured import configured as configured_as

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
UNIT = DEPLOY / "systemd" / "lean-selector.service"
DEFAULTS = DEPLOY / "systemd" / "lean-selector.default"
IN_CHECKOUT = sorted(
    str(path.relative_to(DEPLOY))
    for path in DEPLOY.rglob("*")
    if path.is_file() and path.suffix != ".pyc"
)
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in recipes.recipes().items()}
MANIFESTS = sorted(name for name in TEXTS if name.startswith("kubernetes/"))


def entrypoint() -> list[str]:
    """Of the image."""
    found = re.search(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE.read_text(encoding="utf-8"), re.M)
    assert found is not None
    words: list[str] = json.loads(found[1])
    return words


def documents(name: str) -> list[dict[str, Any]]:
    """The resources of a manifest."""
    return list(yaml.safe_load_all(TEXTS[name]))


def pod_of(resource: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = resource["spec"]["template"]["spec"]
    return spec


def containers(name: str) -> list[dict[str, Any]]:
    """All of a manifest, those that begin first as well."""
    found = []
    for resource in documents(name):
        if resource["kind"] in ("Deployment", "StatefulSet"):
            pod = pod_of(resource)
            found += [*pod.get("initContainers", []), *pod["containers"]]
    return found


def command_of(container: dict[str, Any]) -> list[str]:
    """What a container of our image runs."""
    return [*container.get("command", entrypoint()), *container.get("args", [])]


def is_ours(container: dict[str, Any]) -> bool:
    image: str = container["image"]
    return image.rpartition("/")[2].startswith("lean-selector")


def unit_command(flags: str | None = None) -> list[str]:
    """ExecStart of the unit, with these flags of the operator's, or those of the example."""
    text = UNIT.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(r"^ExecStart=(.*)$", text, re.M)
    assert found is not None
    if flags is None:
        line = re.search(r'^LEAN_SELECTOR_FLAGS="(.*)"$', DEFAULTS.read_text("utf-8"), re.M)
        assert line is not None
        flags = line[1]
    return shlex.split(found[1].replace("$LEAN_SELECTOR_FLAGS", flags))


def configured(words: list[str]) -> SelectorServiceConfig:
    """A command of the selector, read as at its start. A wrong one ends in SystemExit."""
    return configured_as(SelectorServiceConfig, words)
