"""The cost where prefill is not tracked: of 1.3 the blocks alone, of 1.6 less what is cached.

The numbers of 1.6 are those that 1.6.1 logs of the same bookings (`logit=`).
"""

from typing import Any

import msgspec

from lean_selector.core.selection.shapes import EXPLANATION, Explanation, Placement
from lean_selector.core.settings import API_1_3, API_1_6, SessionSettings
from tests.support.driven_selector import DrivenSelector

PROMPT = list(range(1, 13))


def untracked(**settings: Any) -> DrivenSelector:
    terms = {
        "dialect": API_1_6,
        "ttl_s": 120.0,
        "overlap_score_credit": 1.7,
        "prefill_load_scale": 0.7,
        "active_request_weight": 1.5,
        "track_prefill_tokens": False,
    }
    return DrivenSelector(**{**terms, **settings})


def three_workers(**settings: Any) -> DrivenSelector:
    """Worker 1 is believed to hold all of the prompt, worker 3 runs half of it."""
    driven = untracked(**settings)
    for worker_id in (1, 2, 3):
        driven.register(worker_id, taints=frozenset({"c"} if worker_id == 3 else ()))
    driven.book("gone", hashes=PROMPT, pin=(1, 0))
    driven.selector.free("gone", driven.now)
    driven.book("a", hashes=[71, 72], pin=(1, 0))
    driven.book("b", hashes=[81], pin=(1, 0))
    driven.book("c", hashes=[91, 92], pin=(2, 0))
    driven.book("d", hashes=PROMPT[:6], pin=(3, 0))
    return driven


def explained(driven: DrivenSelector, **changes: Any) -> Explanation:
    request = driven.request(PROMPT, 4 * len(PROMPT), adds=EXPLANATION, **changes)
    answer = driven.submit("asked", request)
    assert isinstance(answer, Placement)
    assert isinstance(answer.explain, Explanation)
    return answer.explain


def costs(driven: DrivenSelector, **changes: Any) -> dict[int, float | None]:
    return {row.worker_id: row.cost for row in explained(driven, **changes).ranks}


def test_in_1_6_what_is_cached_is_taken_off_the_blocks_and_off_no_requests_weight() -> None:
    driven = three_workers()
    plain = {1: 3.0, 2: 15.5, 3: 3.3000000000000007}
    assert costs(driven) == plain
    assert costs(driven, preferred_taints={"c": -1.5}) == {**plain, 3: 8.15858479636775}


def test_so_it_is_for_a_request_that_says_so_itself() -> None:
    driven = three_workers(track_prefill_tokens=True)
    for name in "abcd":
        driven.selector.prefill_complete(name, driven.now)
    tracked = costs(driven)
    terms = msgspec.structs.replace(driven.selector.terms, track_prefill=False)
    assert costs(driven, terms=terms) == {1: 3.0, 2: 15.5, 3: 3.3000000000000007}
    assert tracked == {1: 3 + 12 + 3.0, 2: 0.7 * 12 + 2 + 12 + 1.5, 3: 0.7 * 1.8 + 12 + 1.5}


def test_in_1_3_it_saves_nothing() -> None:
    driven = three_workers(dialect=API_1_3)
    assert costs(driven) == {1: 3 + 12 + 3.0, 2: 2 + 12 + 1.5, 3: 12 + 1.5}


def test_without_a_weight_for_requests_all_blocks_may_be_taken_off() -> None:
    driven = three_workers(active_request_weight=0.0)
    assert costs(driven) == {1: 0.0, 2: 14.0, 3: 1.8000000000000007}


def test_a_soft_session_takes_its_bonus_off_what_is_left() -> None:
    sessions = SessionSettings(ttl_s=60.0, is_soft=True, bonus_blocks=64.0)
    driven = three_workers(sessions=sessions)
    driven.book("mine", hashes=[61], allowed=[1], session_id="s")
    assert costs(driven, session_id="s") == {1: 4.5 - 64.0, 2: 15.5, 3: 3.3000000000000007}
