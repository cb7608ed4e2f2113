"""GET /fleet, /choices and /prefixes, in process; time and the loop's turns are the test's."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lean_selector.api.application import page_routes
from lean_selector.api.fleet import MOST_RUNS, FleetView
from lean_selector.api.gate import Gate
from lean_selector.api.ui import Page, page
from lean_selector.api.worker_handlers import ServiceState
from lean_selector.core.index.runs import Run
from lean_selector.core.index.shapes import Tier
from lean_selector.core.index.upper_runs import MOST_CHILDREN, upper_runs
from lean_selector.core.selection.watch import EVERY_S, MOST_KEPT, ChoiceWatch
from lean_selector.http.response import PendingReply
from tests.support.blocks import store_blocks
from tests.support.driven_selector import pack
from tests.support.gates import (
    NOW,
    InProcess,
    NoEngines,
    Turns,
    answer_of,
    answered,
    request,
    selection_service,
)

HASHES = {"block_hashes": [5, 6, 7], "sequence_hashes": [5, 6, 7], "isl_tokens": 12}
HOSTILE = "<script>alert(1)</script>\u202e"


class Looked:
    """A selector that is looked at; time and the loop's turns are the test's."""

    def __init__(self, workers: int = 2, **settings: Any) -> None:
        self.turns, self.now = Turns(), NOW
        self.later: list[Callable[[], None]] = []
        self.service = selection_service(**settings)
        self.selector = self.service.selector
        self.service._clock = lambda: self.now
        self.view = FleetView(
            self.selector, NoEngines(), ServiceState(), clock=lambda: self.now, wall=lambda: 5000.0
        )
        asked = Page(
            self.selector,
            self.view,
            self.turns.call_soon,
            lambda delay, call: self.later.append(call),
        )
        self.gate = Gate([*self.service.routes(), *page_routes(lambda: asked)])
        self.http = InProcess(self.gate)
        self.register = partial(self.http.add_worker, model_name="m", block_size=4)
        for worker_id in range(1, workers + 1):
            self.register(worker_id)

    def get(self, path: str) -> Any:
        answer = self.gate(request("GET", path))
        assert isinstance(answer, PendingReply)
        self.turns.run()
        status, body = answer_of(answer)
        assert status == 200
        return body

    def select(self, tokens: list[int], **more: object) -> Any:
        body = {"model_name": "m", "token_ids": tokens, **more}
        status, answer = self.http.post("/select_and_reserve", body)
        assert status == 200, answer
        return answer

    def store(self, worker_id: int, hashes: list[int]) -> None:
        index = self.selector.catalog.partitions["m", "default"].index
        store_blocks(index, (worker_id, 0), Tier.DEVICE, None, hashes, pack(hashes))

    def eject(self, worker_id: int) -> None:
        for _ in range(3):
            body = {"outcome": "refused"}
            assert self.http.post(f"/workers/{worker_id}/report", body)[0] == 200

    def choices(self) -> Any:
        status, body = answered(self.gate, request("GET", "/choices"))
        assert status == 200
        return json.loads(body)

    def is_watched(self) -> bool:
        return self.selector.watch is not None

    def tick(self) -> None:
        """Runs the timers that are set."""
        due, self.later = self.later, []
        for call in due:
            call()


# -- the fleet -------------------------------------------------------------------------------------


def test_a_rank_has_its_load_its_sums_and_its_state() -> None:
    looked = Looked(1)
    looked.register(2, total_kv_blocks=100, data_parallel_size=2)
    looked.eject(1)
    looked.select(list(range(8)))
    looked.store(2, [11, 12, 13])
    fleet = looked.get("/fleet")
    assert [worker["total_kv_blocks"] for worker in fleet["workers"]] == [None, 100]
    ranks = {(rank["worker_id"], rank["dp_rank"]): rank for rank in fleet["ranks"]}
    assert ranks.keys() == {(1, 0), (2, 0), (2, 1)}
    assert (ranks[1, 0]["state"], ranks[1, 0]["since"]) == ("ejected", 5000)
    given = next(rank for rank in ranks.values() if rank["prompt_tokens"])
    assert (given["worker_id"], given["requests"]) == (2, 1)
    assert (given["prompt_tokens"], given["prefill_tokens"]) == (8, 8)
    assert ranks[2, 0]["cached_blocks"] == 3
    assert fleet["models"][0]["pending_count"] == 0


def test_a_worker_that_cannot_be_chosen_has_its_lifecycle_and_a_finding() -> None:
    looked = Looked(0)
    looked.http.post("/workers", {"worker_id": 3, "model_name": HOSTILE})
    fleet = looked.get("/fleet")
    assert fleet["ranks"][0]["state"] == "incomplete"
    assert fleet["workers"][0]["model_name"] == HOSTILE
    found = {(finding["subject"], finding["level"]) for finding in fleet["findings"]}
    assert {("worker 3", "error"), ("selector", "error")} <= found


def test_findings_are_judged_anew_when_a_state_changes() -> None:
    looked = Looked(2)
    before = looked.get("/fleet")["findings"]
    assert looked.get("/fleet")["findings"] == before
    looked.eject(1)
    after = looked.get("/fleet")["findings"]
    assert [each["subject"] for each in after if each not in before] == ["worker 1"]


# -- prefixes --------------------------------------------------------------------------------------


def test_runs_that_prompts_share_come_before_what_follows_them() -> None:
    looked = Looked(3)
    for worker_id in (1, 2, 3):
        looked.store(worker_id, [1, 2, 10 * worker_id, 10 * worker_id + 1])
    looked.store(1, [7])
    (tree,) = looked.get("/prefixes")
    assert (tree["model_name"], tree["held_blocks"]) == ("m", 13)
    shared = tree["runs"][0]
    assert (shared["parent"], shared["depth"], shared["blocks"]) == (-1, 0, 2)
    assert (shared["holders"], shared["held_blocks"], shared["branches"]) == (3, 6, 3)
    assert shared["first_hash"] == f"{1:016x}"
    assert shared["hits"] is None
    below = [run for run in tree["runs"] if run["parent"] == 0]
    assert {(run["depth"], run["blocks"], run["holders"]) for run in below} == {(2, 2, 1)}
    assert len(below) == 3


def test_a_large_index_is_told_in_part() -> None:
    looked = Looked(1)
    for first in range(1, 3 * MOST_RUNS):
        looked.store(1, [first])
    (tree,) = looked.get("/prefixes")
    assert len(tree["runs"]) == MOST_RUNS
    assert tree["held_blocks"] == 3 * MOST_RUNS - 1


# -- choices ---------------------------------------------------------------------------------------


def told(looked: Looked) -> ChoiceWatch:
    watch = looked.selector.watch = ChoiceWatch()
    return watch


def test_choices_are_collected_while_somebody_asks_for_them() -> None:
    looked = Looked(1)
    looked.select([1, 2, 3, 4])
    assert looked.choices() == {"monotonic": NOW, "seen": 0, "choices": []}
    looked.select([1, 2, 3, 4])
    looked.tick()
    answer = looked.choices()
    assert (answer["seen"], len(answer["choices"])) == (1, 1)
    looked.tick()
    assert looked.is_watched()
    looked.tick()
    assert not looked.is_watched()
    assert looked.later == []
    looked.select([1, 2, 3, 4])
    assert looked.choices()["seen"] == 0


def test_a_choice_tells_the_five_best_and_what_their_cost_is_made_of() -> None:
    looked = Looked(9)
    watch = told(looked)
    for _ in range(6):
        looked.now += EVERY_S
        looked.select(list(range(40)))
    choice = watch.kept[-1]
    assert (choice.candidates, len(choice.best), choice.prompt_blocks) == (9, 5, 10)
    costs = [each.rank.cost for each in choice.best]
    assert costs == sorted(costs, key=lambda cost: cost or 0.0)
    assert (choice.worker_id, choice.dp_rank) in {
        (each.rank.worker_id, each.rank.dp_rank) for each in choice.best
    }
    for each in choice.best:
        assert sum(each.terms.values()) == pytest.approx(each.rank.cost)


@pytest.mark.parametrize(
    "more",
    [
        {"router_config_override": {"router_temperature": 1.0}},
        {"router_config_override": {"overlap_score_credit": 0.25}},
        {"router_config_override": {"track_prefill_tokens": False}},
        {"router_config_override": {"policy": "latency"}},
        {"routing_constraints": {"preferred_taints": {"gpu": 1.0}}},
    ],
)
def test_the_terms_add_up_to_the_cost_whatever_is_asked(more: dict[str, object]) -> None:
    looked = Looked(3)
    looked.register(4, taints=["gpu"], host_blocks=3)
    watch = told(looked)
    for first in range(4):
        looked.now += EVERY_S
        looked.select([first, *range(20)], **more)
    assert len(watch.kept) == 4
    for choice in watch.kept:
        for each in choice.best:
            assert sum(each.terms.values()) == pytest.approx(each.rank.cost)


def test_of_many_choices_some_are_explained_and_all_are_counted() -> None:
    looked = Looked(2)
    looked.store(1, [5, 6])
    watch = told(looked)
    body = {"model_name": "m", **HASHES}
    for _ in range(50):
        assert looked.http.post("/select", body)[0] == 200
    assert (watch.seen, len(watch.kept)) == (50, 1)
    assert list(watch.hits.values()) == [50]
    for _ in range(2 * MOST_KEPT):
        looked.now += EVERY_S
        looked.http.post("/select", body)
    assert len(watch.kept) == MOST_KEPT


def test_runs_have_their_hits_while_choices_are_collected() -> None:
    looked = Looked(1)
    looked.store(1, [5, 6])
    looked.choices()
    looked.http.post("/select", {"model_name": "m", **HASHES})
    assert looked.get("/prefixes")[0]["runs"][0]["hits"] == 1


def test_runs_of_ranks_that_are_gone_do_not_count_and_a_look_ends() -> None:
    root, serial = Run(0, 0, b"", None), itertools.count(1)

    def child(parent: Run) -> Run:
        number = next(serial)
        run = Run(number, 0, number.to_bytes(8, "little"), parent)
        run.whole = 1
        parent.children = {**(parent.children or {}), bytes(run.label): run}
        return run

    gone = child(root)
    gone.whole, gone.partial = 0, {3: 1}
    several = [child(root) for _ in range(5)]
    for parent in several:
        parent.children = {
            number.to_bytes(8, "little"): Run(number, 0, number.to_bytes(8, "little"), parent)
            for number in range(MOST_CHILDREN)
        }
        for run in parent.children.values():
            run.whole = 1
    runs = [run for run in upper_runs(root, 0b1, 25_000) if run is not None]
    assert all(run.holders for run in runs)
    assert len(runs) == 20_000 - 1


def test_the_page_lets_nothing_run_but_what_is_in_it() -> None:
    text, lines = page()
    assert len(text) < 64 * 1024
    assert b"unsafe" not in lines
    assert lines.count(b"sha256-") == 2
    assert b"default-src 'none'" in lines
    for kind in (b"script", b"style"):
        assert text.count(b"<" + kind) == 1
    for wrong in (b"innerHTML", b"outerHTML", b"insertAdjacentHTML", b"document.write", b"eval("):
        assert wrong not in text
    for attribute in (b' style="', b' onclick="', b"http://", b"https://"):
        assert attribute not in text


def test_the_page_is_served_as_it_is() -> None:
    looked = Looked(0)
    status, body = answered(looked.gate, request("GET", "/ui"))
    assert (status, body) == (200, page()[0])
