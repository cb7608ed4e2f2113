"""The child process: asked over HTTP, watched, and gone afterwards whatever it does."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from lean_selector.tools import service_process
from lean_selector.tools.service_process import running_service
from tests.support.on_loop import on_loop, until


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
