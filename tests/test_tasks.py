"""Tasks that nobody awaits: what becomes of one that fails."""

import asyncio

import pytest
import uvloop

from lean_selector import tasks
from lean_selector.tasks import failures, supervise


def test_a_task_that_fails_is_logged_counted_and_begun_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "AGAIN_FIRST_S", 0.0)
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise RuntimeError("a bug")

    async def story() -> None:
        await supervise("a test", work)

    before = failures["a test"]
    uvloop.run(story())
    assert runs == 3
    assert failures["a test"] == before + 2
    assert [record.getMessage() for record in caplog.records] == [
        "task failed: a test; it is begun again"
    ] * 2
    assert caplog.records[0].exc_info is not None


def test_a_task_that_is_not_to_be_begun_again_ends_quietly_after_its_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        raise RuntimeError("a bug")

    async def story() -> None:
        await supervise("another test", work, again=False)

    uvloop.run(story())
    assert "task failed: another test; it has ended" in caplog.text


def test_a_cancellation_that_nobody_sent_to_the_task_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "AGAIN_FIRST_S", 0.0)
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    async def story() -> None:
        await supervise("a third test", work)

    uvloop.run(story())
    assert (runs, failures["a third test"]) == (2, 1)


def test_a_task_that_is_cancelled_ends_and_is_no_failure() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    async def cancelled() -> bool:
        task = supervise("a fourth test", wait)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert uvloop.run(cancelled())
    assert failures["a fourth test"] == 0
