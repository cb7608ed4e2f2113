"""The child process: asked over HTTP, watched, and gone afterwards whatever it does."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lean_selector.tools import service_process
from lean_selector.tools.service_process import running_service
from tests.support.on_loop import on_loop, until


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
    before = psutil.Process().children()

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
    assert psutil.Process().children() == before
    child = int(ready.read_text())
    await until(lambda: _has_ended(child), "the kernel has ended the child that was killed")


def _has_ended(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True
