"""Names are looked up beside the loop; one that hangs delays nobody else."""

import asyncio
import socket
import threading
from collections import Counter

import pytest

from lean_selector.http.outbound import reason
from lean_selector.links import names as module
from lean_selector.links.names import Address, Resolver, look_up
from tests.support.on_loop import DEADLINE_S, on_loop, until


class Names:
    """A name server: names that begin with `hang` are answered only once it is released."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.release = threading.Event()

    def look_up(self, name: str) -> list[Address]:
        self.asked[name] += 1
        if name.startswith("hang"):
            assert self.release.wait(DEADLINE_S)
        if name.startswith("no"):
            raise socket.gaierror(-2, "Name or service not known")
        if name.startswith("bug"):
            raise KeyError(name)
        return [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]


def resolving() -> tuple[Names, Resolver]:
    names = Names()
    return names, Resolver(names.look_up)


@on_loop
async def test_an_address_takes_no_thread() -> None:
    def never(name: str) -> list[Address]:
        raise AssertionError(name)

    resolver = Resolver(never)
    assert await resolver.resolve("127.0.0.1", 5) == [(socket.AF_INET, ("127.0.0.1", 5))]
    assert await resolver.resolve("[::1]", 5) == [(socket.AF_INET6, ("::1", 5, 0, 0))]


@on_loop
async def test_a_name_gives_both_families_in_the_order_of_the_answer() -> None:
    assert await Resolver(Names().look_up).resolve("a", 7) == [
        (socket.AF_INET6, ("::1", 7, 0, 0)),
        (socket.AF_INET, ("127.0.0.1", 7)),
    ]


def test_the_system_knows_localhost_and_says_so_of_what_is_no_name() -> None:
    assert (socket.AF_INET, ("127.0.0.1", 0)) in look_up("localhost")
    with pytest.raises(OSError, match="not a host name"):
        look_up("a" * 70 + ".b")


@on_loop
async def test_names_that_hang_do_not_delay_the_others() -> None:
    names, resolver = resolving()
    hanging = [
        asyncio.ensure_future(resolver.resolve(f"hang-{n}", 1))
        for n in range(module.MAX_THREADS - 1)
    ]
    assert await asyncio.wait_for(resolver.resolve("a", 1), DEADLINE_S)
    assert not any(task.done() for task in hanging)
    names.release.set()
    assert len(await asyncio.gather(*hanging)) == len(hanging)


@on_loop
async def test_all_who_ask_for_a_name_at_once_share_one_look_up() -> None:
    names, resolver = resolving()
    asking = [asyncio.ensure_future(resolver.resolve("hang", port)) for port in range(1, 101)]
    await asyncio.sleep(0)
    asking.pop().cancel()  # one that gives up takes nobody along
    names.release.set()
    answers = await asyncio.gather(*asking)
    assert answers[41][1] == (socket.AF_INET, ("127.0.0.1", 42))
    assert await resolver.resolve("hang", 9)  # and the answer holds for a moment
    assert names.asked["hang"] == 1


@on_loop
async def test_an_answer_does_not_hold_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLDS_S", 0.0)
    names, resolver = resolving()
    while names.asked["a"] < 2:
        await resolver.resolve("a", 1)


@pytest.mark.parametrize(
    ("name", "text"), [("no-such", "Name or service not known"), ("bug", "KeyError: 'bug'")]
)
@on_loop
async def test_a_look_up_that_fails_says_why(name: str, text: str) -> None:
    names, resolver = resolving()
    for _ in range(2):
        with pytest.raises(OSError, match=text) as caught:
            await resolver.resolve(name, 1)
        assert text in reason(caught.value)
    assert names.asked[name] == 1


@on_loop
async def test_a_process_ends_though_a_look_up_hangs() -> None:
    resolver = Resolver(Names().look_up)
    before = set(threading.enumerate())
    task = asyncio.ensure_future(resolver.resolve("hang", 1))
    await until(lambda: set(threading.enumerate()) - before)
    task.cancel()
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "look-up"
    assert thread.daemon
