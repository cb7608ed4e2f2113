"""Workers that do only a part of each request: who gets what, and what is missing."""

import random

import pytest

from lean_selector.core.errors import Unavailable
from lean_selector.core.selection.scheduler import eligible
from lean_selector.core.selection.shapes import BOTH, DECODE, PREFILL
from lean_selector.core.settings import EjectionSettings
from tests.support.driven_selector import DrivenSelector, fleet_of


def test_a_worker_that_only_prefills_gets_none_and_the_error_names_the_role() -> None:
    driven = fleet_of("prefill")
    for changes in ({}, {"allowed": [1]}, {"pin": (1, 0)}):
        with pytest.raises(Unavailable, match="no worker has the role both or decode"):
            driven.submit("s", driven.request([], 16, **changes))
    driven.register(2, worker_role="decode")
    with pytest.raises(Unavailable, match=r"no endpoints available to route work$"):
        driven.submit("s", driven.request([], 16, pin=(1, 0)))
    driven.remove(2)
    driven.register(3, worker_role="decode")  # a loss of all heals by itself
    assert driven.chosen() == {3}


def test_of_roles_that_nobody_has_the_catalog_tells() -> None:
    catalog = (driven := fleet_of()).selector.catalog
    seen = []
    for worker_id, role in ((1, "both"), (1, "prefill"), (2, "decode"), (1, "decode"), (3, "both")):
        driven.register(worker_id, worker_role=role)
        seen.append((catalog.can_serve(), catalog.missing_roles()))
    assert seen == [(True, []), (False, ["decode"]), (True, []), (True, ["prefill"]), (True, [])]


def test_pairs_are_asked_for_where_roles_are_apart() -> None:
    """Also after the last prefill worker has gone; and whoever is there, if the gateway says so."""
    driven = fleet_of("both")
    asked = []
    for worker_id, role in ((2, "prefill"), (2, "decode"), (1, "decode"), (3, "both")):
        driven.register(worker_id, worker_role=role)
        asked.append(driven.selector.pairs_asked(driven.partition))
    assert asked == ["auto", "never", "auto", "never"]
    driven = DrivenSelector(asks_pairs=True)
    driven.register(1)
    assert driven.selector.pairs_asked(driven.partition) == "auto"


def test_the_sets_of_ranks_are_what_the_workers_are() -> None:
    """Whoever comes, changes, drains, is ejected or goes."""
    ejection = EjectionSettings(failures=1, most_percent=100.0)
    dice, driven = random.Random(5), DrivenSelector(ejection=ejection)
    driven.register(0)
    some = driven.request([], 1, allowed={0, 1, 2})
    roles: dict[int, str] = {0: BOTH}
    for _ in range(400):
        worker_id = dice.randrange(1, 6)
        turn = dice.random()
        if turn < 0.5:
            roles[worker_id] = dice.choice([BOTH, PREFILL, DECODE])
            driven.register(worker_id, worker_role=roles[worker_id], data_parallel_size=2)
        elif worker_id in roles and turn < 0.7:
            del roles[worker_id]
            driven.remove(worker_id)
        elif worker_id in roles and turn < 0.85:
            state = {"lifecycle": dice.choice(["draining", "schedulable"])}
            driven.selector.patch_worker(worker_id, dict(state), driven.now)
        else:
            worker_id = dice.choice(list(roles))
            outcome = dice.choice(["failed", "ok"])
            driven.selector.health.record_outcome(worker_id, None, outcome, 0.0)
        partition = driven.partition
        of = {
            role: sum(w.mask for w in partition.workers.values() if w.role == role)
            for role in (BOTH, PREFILL, DECODE)
        }
        assert {w.worker_id: w.role for w in partition.workers.values()} == roles
        assert (partition.prefill_only, partition.decode_only) == (of[PREFILL], of[DECODE])
        out = sum(partition.slots.ranks[key].mask for key in partition.health.out)
        among = sum(w.mask for w in partition.workers.values() if w.worker_id <= 2)
        for ranks, found in ((-1, partition.candidates), (among, eligible(partition, some))):
            serving = ranks & ~partition.draining
            whole, parts = serving & of[BOTH], serving & of[DECODE]
            assert found == (whole & ~out or parts & ~out or whole or parts)
