"""The image: the Dockerfile's steps carried out in a clean folder, and what they leave, run.

In CI's compiled run LEAN_SELECTOR_IMAGE names the folder where the steps were carried out with the
package compiled; otherwise they are carried out here, without a compiler. Where a docker daemon is,
nothing else is done with it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lean_selector.build_info import form
from loadtest.child_service import ChildService, free_port, plain_environment
from tests.deploy.recipe_commands import DOCKERFILE, IN_CHECKOUT
from tests.support.running_service import DEADLINE_S

CHECKOUT = Path(__file__).parents[2]
STEPS = CHECKOUT / ".ci" / "dockerfile_steps.py"
IMAGE = "LEAN_SELECTOR_IMAGE"


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    given = os.environ.get(IMAGE)
    if given:
        yield Path(given)
        return
    if not (CHECKOUT / "lean_selector").is_dir():
        pytest.skip("the package is not built from this folder")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, STEPS, DOCKERFILE, Path(folder) / "image", "COMPILE=0"],
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield Path(folder) / "image"


def described(image: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((image / "image.json").read_text())
    return found


def environment(image: Path) -> dict[str, str]:
    return plain_environment(**described(image)["env"])


def ran(image: Path, *words: str) -> str:
    found = described(image)
    done = subprocess.run(
        [*found["entrypoint"], *words],
        cwd=found["working_dir"],
        env=environment(image),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_carries_deploy(image: Path) -> None:
    (wheel,) = (image / "stages" / "build" / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if n.startswith("lean_selector/deploy/")}
        assert names == {f"lean_selector/deploy/{name}" for name in IN_CHECKOUT}
        (record,) = (n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
        assert all(name in archive.read(record).decode() for name in names)


def test_what_it_installs_prints_the_recipes(image: Path) -> None:
    assert ran(image, "deploy", "--list").splitlines() == IN_CHECKOUT
    assert ran(image, "deploy", "--print", "docker/Dockerfile") == DOCKERFILE.read_text("utf-8")


def test_it_holds_the_form_that_was_asked_for(image: Path) -> None:
    expected = form() if os.environ.get(IMAGE) else "pure"
    assert f"({expected})" in ran(image, "--version")


def test_it_serves_as_a_user_without_rights_on_a_read_only_file_system(image: Path) -> None:
    """With nothing that a container would not have, but that this user may read whatever there is:
    the tests' Python may lie where others may not look."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can mount a file system read-only (with setpriv of util-linux)")
    found = described(image)
    user, group = found["user"].split(":")
    assert int(user) > 0
    reads = "+dac_read_search"
    as_nobody = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    as_nobody += [f"--inh-caps={reads}", f"--ambient-caps={reads}", f"--bounding-set=-all,{reads}"]
    as_nobody += ["--no-new-privs"]
    port = free_port()
    words = [
        shutil.which(found["entrypoint"][0], path=found["env"]["PATH"]),
        *found["entrypoint"][1:],
    ]
    script = (
        "cut -d' ' -f2 /proc/self/mounts | while read at; do"
        ' mount -o remount,bind,ro "$at" 2>/dev/null; done;'
        " if touch /tmp/written 2>/dev/null; then echo 'not read-only' >&2; exit 9; fi;"
        ' cd "$1"; shift; exec "$@"'
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh", found["working_dir"], *as_nobody]
    command += [*map(str, words), "--port", str(port)]
    service = ChildService(command, port, env=environment(image))
    try:
        if service.process.poll() == 1 and "unshare failed" in service.log():
            pytest.skip("this machine lets root make no mount namespace")
        service.wait()
        status = Path(f"/proc/{service.process.pid}/status").read_text()
        assert re.search(rf"^Uid:\s+{user}\s+{user}", status, re.M)
        assert re.search(r"^CapEff:\s+0000000000000004$", status, re.M)
        worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 4}
        worker["kv_events_endpoint"] = "tcp://127.0.0.1:1"
        headers = {"content-type": "application/json"}
        raw = json.dumps(worker).encode()
        assert service.request("POST", "/workers", raw, headers)[0] == 201
        body = b'{"token_ids": [1, 2, 3, 4]}'
        assert service.request("POST", "/select", body, headers)[0] == 200
        assert "rror" not in service.log()
    finally:
        service.stop(15, DEADLINE_S)
