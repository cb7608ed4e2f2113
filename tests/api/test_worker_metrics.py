"""Metrics of single workers and models: what they count, and that their labels are bounded."""

from lean_selector.api.selector_metrics import model_outcomes, worker_families
from lean_selector.core.errors import NoWorkers
from lean_selector.core.selection.partition import Partition
from lean_selector.wire.exposition import FamilyGroup
from tests.support.driven_selector import DrivenSelector

NAMED = 'model="default",tenant_id="default",worker_id='


def partitions(driven: DrivenSelector) -> list[Partition]:
    return list(driven.selector.catalog.partitions.values())


def scraped(driven: DrivenSelector) -> dict[str, float]:
    families = worker_families(driven.selector, lambda: partitions(driven), lambda: driven.now)
    text = "".join(piece for family in families for piece in family.text())
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_what_a_worker_was_given_and_how_that_went() -> None:
    driven = DrivenSelector()
    driven.register(1)
    driven.register(2)
    driven.book("a", isl_tokens=16, pin=(1, 0))
    driven.book("b", hashes=[1, 2, 3], isl_tokens=13, pin=(1, 0))
    driven.selector.reservations.end("b", "ok", 8, driven.now)
    driven.selector.health.record_outcome(1, 0, "failed", driven.now, ttft_s=0.25, cached_tokens=4)
    found = scraped(driven)
    for name, value in {
        f'lean_selector_worker_selections_total{{{NAMED}"1"}}': 2,
        f'lean_selector_worker_selections_total{{{NAMED}"2"}}': 0,
        f'lean_selector_worker_prompt_tokens_total{{{NAMED}"1"}}': 29,
        f'lean_selector_worker_overlap_tokens_total{{{NAMED}"1"}}': 0,
        f'lean_selector_worker_cached_tokens_total{{{NAMED}"1"}}': 12,
        f'lean_selector_worker_compared_cached_tokens_total{{{NAMED}"1"}}': 8,
        f'lean_selector_worker_compared_overlap_tokens_total{{{NAMED}"1"}}': 0,
        f'lean_selector_worker_reports_total{{{NAMED}"1",outcome="ok"}}': 1,
        f'lean_selector_worker_reports_total{{{NAMED}"1",outcome="failed"}}': 1,
        f'lean_selector_worker_ttft_seconds_total{{{NAMED}"1"}}': 0.25,
    }.items():
        assert found[name] == value, name


def test_the_predicted_overlap_is_that_of_the_requests_whose_engine_told() -> None:
    driven = DrivenSelector()
    driven.register(1)
    driven.reserve("told", hashes=[1, 2, 3], isl_tokens=13, prefill=5)  # two blocks of four
    driven.reserve("untold", hashes=[1, 2, 3], isl_tokens=13, prefill=5)
    driven.reserve("unknown", hashes=[1, 2, 3], isl_tokens=13, prefill=None)
    driven.selector.reservations.end("told", None, 4, driven.now)
    driven.selector.reservations.end("untold", "ok", None, driven.now)
    driven.selector.reservations.end("unknown", None, 12, driven.now)
    counts = driven.partition.counts()
    assert (counts.compared_tokens, counts.compared_overlap_tokens) == (4, 8)
    assert counts.cached_tokens == 16


def test_index_accuracy_is_of_prompts_whose_blocks_are_known_and_forgives_the_last_block() -> None:
    driven = DrivenSelector()
    driven.register(1)
    name = f'lean_selector_worker_index_accuracy{{{NAMED}"1"}}'

    def told(prefill: int, isl_tokens: int, cached: int, known: int | None = None) -> float | None:
        driven.reserve("r", hashes=[1, 2, 3], isl_tokens=isl_tokens, prefill=prefill)
        driven.selector.reservations.end("r", None, cached, driven.now, known)
        return scraped(driven).get(name)

    assert told(13, 13, 12, known=0) is None  # none of its blocks was asked for
    assert told(5, 13, 8) == 1.0
    assert told(0, 12, 8) == 1.0  # all three blocks: the engine computes the last token
    assert 0.7 < (told(5, 13, 12) or 0.0) < 0.9  # 4 missed of about 20
    for _ in range(300):
        told(5, 13, 8)
    assert (told(5, 13, 8) or 0.0) > 0.99


def test_how_long_a_worker_is_ejected() -> None:
    driven = DrivenSelector()
    driven.register(1)
    driven.register(2)
    for _ in range(3):
        driven.selector.health.record_outcome(2, None, "refused", driven.now)
    driven.now = 7.0
    found = scraped(driven)
    assert found[f'lean_selector_worker_ejected_seconds{{{NAMED}"2"}}'] == 7.0
    assert found[f'lean_selector_worker_ejected_ranks{{{NAMED}"2"}}'] == 1
    assert found[f'lean_selector_worker_ejected_ranks{{{NAMED}"1"}}'] == 0


def test_ejections_are_counted_by_what_they_came_of() -> None:
    driven = DrivenSelector()
    for worker_id in range(8):
        driven.register(worker_id)
    health = driven.selector.health
    for worker_id, outcomes in enumerate(
        (["refused"] * 3, ["refused", "failed", "refused"], ["refused", "refused", "failed"])
    ):
        for outcome in outcomes:
            health.record_outcome(worker_id, None, outcome, driven.now)
    for _ in range(3):
        health.polled(3, "503", driven.now)
    driven.now = 31.0
    health.settle(driven.now)
    health.record_outcome(0, 0, "failed", driven.now)  # on probation: at once
    found = scraped(driven)
    start = 'lean_selector_rank_ejections_total{model="default",tenant_id="default",reason='
    counts = {name[len(start) : -1]: found[name] for name in found if name.startswith(start)}
    assert counts == {'"refused"': 2, '"failed"': 2, '"poll"': 1}


def test_a_worker_that_goes_while_a_scrape_is_made_is_left_out_of_it() -> None:
    driven = DrivenSelector()
    for worker_id in (1, 2, 3):
        driven.register(worker_id)
    families = worker_families(driven.selector, lambda: partitions(driven))
    (group,) = (each for each in families if isinstance(each, FamilyGroup))
    figures = group.things()
    labels = [next(iter(figures))[0]]
    driven.remove(2)
    labels += [label for label, _ in figures]
    assert labels == [f'{{{NAMED}"1"}}', f'{{{NAMED}"3"}}']


def refused(driven: DrivenSelector, model: str) -> NoWorkers:
    try:
        driven.selector.catalog.ready_partition(model, "default")
    except NoWorkers as error:
        return error
    raise AssertionError("it has workers")


def test_a_model_that_had_workers_is_refused_under_its_name_and_any_other_under_none() -> None:
    driven = DrivenSelector()
    driven.register(1, model_name="a")
    driven.register(2, model_name="b")
    driven.remove(2)
    assert refused(driven, "b").is_missing
    assert not refused(driven, "typo").is_missing
    assert refused(driven, "typo").known_models == ["a"]
    samples = dict(filter(None, model_outcomes(driven.selector, partitions(driven))))
    assert samples['{model="b",tenant_id="default",outcome="no_worker"}'] == 1
    assert samples['{model="other",tenant_id="other",outcome="unknown_model"}'] == 2
    assert not any("typo" in label for label in samples)


def test_a_tenant_that_a_model_has_no_workers_of_is_neither_missing_nor_an_unknown_model() -> None:
    driven = DrivenSelector()
    driven.register(1, model_name="a", tenant_id="acme")
    driven.register(2, model_name="b", tenant_id="acme")
    for model in ("a", "b", "b"):
        error = refused(driven, model)
        assert not error.is_missing
        assert error.other_tenants == f"model {model} has workers of another tenant: acme"
    assert refused(driven, "typo").other_tenants is None
    samples = dict(filter(None, model_outcomes(driven.selector, partitions(driven))))
    assert samples['{model="a",tenant_id="other",outcome="unknown_tenant"}'] == 1
    assert samples['{model="b",tenant_id="other",outcome="unknown_tenant"}'] == 2
    assert samples['{model="other",tenant_id="other",outcome="unknown_model"}'] == 1
    assert '{model="other",tenant_id="other",outcome="unknown_tenant"}' not in samples
    driven.remove(1)
    driven.register(3, model_name="a")
    driven.remove(3)
    assert refused(driven, "a").is_missing


def test_where_nobody_has_workers_any_model_is_one_that_misses_them() -> None:
    driven = DrivenSelector()
    assert refused(driven, "whatever").is_missing
    samples = dict(filter(None, model_outcomes(driven.selector, partitions(driven))))
    assert samples['{model="other",tenant_id="other",outcome="no_worker"}'] == 1
    assert samples['{model="other",tenant_id="other",outcome="unknown_model"}'] == 0


def test_what_was_given_to_ranks_that_are_gone_stays_in_the_sums_of_the_model() -> None:
    driven = DrivenSelector()
    driven.register(1)
    driven.register(2)
    driven.book("a", isl_tokens=16, pin=(1, 0))
    driven.remove(1)
    assert driven.partition.counts().prompt_tokens == 16
