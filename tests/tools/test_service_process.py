"""The child process: asked over HTTP, watched, and gone afterwards whatever it does."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from lean_selector.tools import service_process
from lean_selector.tools.service_process import HttpClient, ServiceError, running_service
from tests.support.on_loop import on_loop, until
from tests.support.outbound_server import Serve, hangs, response, says, serving


def child_pids() -> set[str]:
    pid = os.getpid()
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@pytest.mark.parametrize("impatient", [False, True], ids=["timed out", "cancelled"])
@on_loop
async def test_a_child_deaf_to_sigterm_is_killed_with_its_own_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, impatient: bool
) -> None:
    monkeypatch.setattr(service_process, "STOP_TIMEOUT_S", 600 if impatient else 0.2)
    ready = tmp_path / "ready"
    program = (
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        f"if child: pathlib.Path({str(ready)!r}).write_text(str(child))\n"
        "time.sleep(600)"
    )

    leaving = asyncio.Event()
    before = child_pids()

    async def use() -> None:
        async with running_service([sys.executable, "-c", program]):
            await until(lambda: ready.exists() and ready.read_text(), "the child has started")
            leaving.set()

    task = asyncio.create_task(use())
    await leaving.wait()
    await asyncio.sleep(0)  # the task is inside stop() now
    if impatient:
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert child_pids() == before
    stat = Path(f"/proc/{ready.read_text()}/stat")
    await until(lambda: _has_ended(stat), "the kernel has ended the child that was killed")


def _has_ended(stat: Path) -> bool:
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:  # it went, perhaps while this was read
        return True


@pytest.mark.parametrize(
    ("serve", "words"),
    [
        (says(response(b"no such route", "404 Not Found")), "404 no such route"),
        (says(), ""),
        (says(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab"), ""),
        (says(b"what is this\r\n\r\n"), ""),
        (hangs, "no answer"),
    ],
    ids=["refused", "hangs up", "hangs up halfway", "not HTTP", "silent"],
)
@on_loop
async def test_a_request_without_a_good_answer_is_an_error_that_names_it(
    serve: Serve, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words == "no answer":
        monkeypatch.setattr(service_process, "ANSWER_TIMEOUT_S", 0.02)
    async with serving(serve) as served:
        client = HttpClient(served.url)
        with pytest.raises(ServiceError, match=f"^POST /x: .*{words}"):
            await client.call("POST", "/x", {"k": [1, 2]})
        client.close()
        # On a busy machine the time may be over before the request was sent.
        assert all(each.endswith(b'\r\n\r\n{"k":[1,2]}') for each in served.requests)
        assert served.requests or words == "no answer"
