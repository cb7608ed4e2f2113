"""Under which address a worker is offered, and what a subset allows."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lean_selector.epp.picking import Addresses
from tests.support.on_loop import on_loop, until


class Names:
    """The resolver."""

    def __init__(self, **known: str) -> None:
        self.known = known
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[Any]:
        self.asked.append(host)
        await asyncio.sleep(0)
        if host not in self.known:
            raise OSError("unknown")
        return [(2, (self.known[host], port))]


def addresses(*bases: str, names: Names | None = None) -> tuple[Addresses, Any]:
    fleet: Any = SimpleNamespace(revision=1, all=list(bases))
    fleet.bases = lambda: fleet.all
    return Addresses(fleet, names or Names()), fleet


FOUR, SIX = "http://10.0.0.1:8000", "http://[fd00::2]:8000"


@on_loop
async def test_addresses_need_no_look_up() -> None:
    found, _ = addresses(FOUR, SIX)
    assert found.among(None) is None
    assert found.by_base == {FOUR: b"10.0.0.1:8000", SIX: b"[fd00::2]:8000"}
    assert found.unresolved == 0


@pytest.mark.parametrize(
    ("subset", "told"),
    [
        ([b"10.0.0.1:8000"], [FOUR]),
        ([b"10.0.0.1"], [FOUR]),
        ([b"[fd00::2]:8000"], [SIX]),
        ([b"[FD00::2]:8000"], [SIX]),
        ([b"fd00::2:8000"], [SIX]),
        ([b"fd00::2"], [SIX]),
        ([b"[fd00::2]"], [SIX]),
        ([b"10.0.0.1:8001", b"[x]:1", b"]"], []),
        ([b"10.0.0.1", b"10.0.0.1:8000", b"fd00::2"], [FOUR, SIX]),
        ([], []),
    ],
)
@on_loop
async def test_a_subset_is_matched_on_addresses(subset: list[bytes], told: list[str]) -> None:
    found, _ = addresses(FOUR, SIX)
    assert found.among(subset) == told


@on_loop
async def test_a_name_is_offered_under_its_address_and_not_before_it_has_one() -> None:
    names = Names(worker="10.0.0.7")
    named, lost = "http://worker:8000", "http://lost:8000"
    found, fleet = addresses(FOUR, named, lost, names=names)
    assert found.among(None) == [FOUR]
    assert found.unresolved == 2
    await until(lambda: found.unresolved == 1)
    assert found.among(None) == [FOUR, named]
    assert found.among([b"10.0.0.7:8000"]) == [named]
    assert found.bases_at(b"10.0.0.7:8000") == [named]
    names.known["worker"] = "10.0.0.8"
    found.tick(1e9)
    await until(lambda: found.by_base[named] == b"10.0.0.8:8000")
    fleet.revision, fleet.all = 2, [FOUR]
    assert found.among(None) is None
    assert found.among([b"10.0.0.8"]) == []
