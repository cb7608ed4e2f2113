"""How full a partition is: what an autoscaler goes by."""

import math
from typing import Any

import pytest

from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.core.selection.inspection import saturation
from lean_selector.core.selection.shapes import SelectionRequest
from tests.support.driven_selector import BLOCK_SIZE, DrivenSelector, prompt_of, teach

KEY = ("default", "default")


class Fleet(DrivenSelector):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for worker_id in (1, 2):
            self.register(worker_id, max_num_batched_tokens=100, total_kv_blocks=40)

    def load(self, worker_id: int, tokens: int, hashes: int = 0) -> str:
        name = f"{len(self.partition.slots.reservations)}"
        prompt = prompt_of(
            [worker_id * 1000 + at for at in range(hashes)], hashes * BLOCK_SIZE + tokens
        )
        booked = name, worker_id, 0, prompt, tokens, self.now
        self.selector.reservations.reserve(self.partition, *booked)
        return name

    @property
    def saturation(self) -> float:
        return saturation(self.partition)


@pytest.mark.parametrize(("threshold", "batches"), [(None, 1), (2.0, 2), (0.0, 1), (math.inf, 1)])
def test_prefill_counts_by_the_queue_s_threshold(threshold: float | None, batches: int) -> None:
    fleet = Fleet(queue_threshold=threshold)
    assert fleet.saturation == 0
    fleet.load(1, 100)
    assert fleet.saturation == pytest.approx(0.5 / batches)
    fleet.load(2, 300)
    assert fleet.saturation == pytest.approx(2.0 / batches)


def test_each_rank_counts_by_what_it_has_less_of() -> None:
    fleet = Fleet()
    fleet.load(1, 50, hashes=30)
    fleet.load(2, 50, hashes=10)
    assert fleet.saturation == pytest.approx((30 / 40 + 50 / 100) / 2)


def test_thresholds_of_shedding_are_what_full_means() -> None:
    fleet = Fleet()
    fleet.load(1, 50, hashes=17)
    fleet.selector.change_threshold(KEY, BusyThreshold(active_decode_blocks=0.5), 0.0)
    assert fleet.saturation == pytest.approx((17 / 20) / 2)
    fleet.selector.change_threshold(KEY, BusyThreshold(active_prefill_tokens=40), 0.0)
    assert fleet.saturation == pytest.approx((50 / 40) / 2)


def test_what_waits_is_what_is_missing() -> None:
    fleet = Fleet(queue_threshold=1.0)
    for worker_id in (1, 2):
        fleet.load(worker_id, 120)
    request = SelectionRequest(prompt_of([], 80), fleet.selector.terms)
    fleet.selector.select(fleet.partition, request, 0.0)
    assert fleet.saturation == pytest.approx((120 + 80 / 2) / 100)
    for worker_id in (1, 2):
        fleet.selector.patch_worker(worker_id, {"lifecycle": "draining"}, 0.0)
    assert fleet.saturation == 2


def test_with_a_target_a_slow_rank_is_full_by_the_time_that_its_prefill_takes() -> None:
    fleet = Fleet(queue_threshold=1.0)
    for worker_id in (1, 2):
        fleet.load(worker_id, 120)
    request = SelectionRequest(prompt_of([], 80), fleet.selector.terms)
    fleet.selector.select(fleet.partition, request, 0.0)
    by_tokens = (120 + 80 / 2) / 100
    assert saturation(fleet.partition, 4.0) == pytest.approx(by_tokens)  # no speed is known
    teach(fleet.partition, fleet.partition.slots.ranks[1, 0], 0.1)
    by_time = (120 + 80 / 2) * 0.1 / 4.0
    assert saturation(fleet.partition, 4.0) == pytest.approx((by_time + by_tokens) / 2)
    assert saturation(fleet.partition, 100.0) == pytest.approx(by_tokens)
    assert fleet.saturation == pytest.approx(by_tokens)


def test_a_rank_that_gets_no_requests_does_not_count() -> None:
    fleet = Fleet()
    fleet.load(1, 100)
    fleet.selector.patch_worker(1, {"lifecycle": "draining"}, 0.0)
    assert fleet.saturation == 0
