"""An engine's words against its registration."""

from lean_selector.tools.check_judgements import Level, WorkerRecord, judge_engine
from lean_selector.workers.particulars import Particulars


def judged(told: Particulars, **registered: object) -> list[tuple[Level, str, str | None]]:
    record = WorkerRecord(
        worker_id=7,
        model_name="m",
        lifecycle="schedulable",
        endpoint="http://gpu:8000",
        **registered,  # type: ignore[arg-type]
    )
    return [(found.level, found.what, found.mend) for found in judge_engine(record, told)]


def test_an_engine_that_agrees_is_fine() -> None:
    told = Particulars(model_name="m", block_size=16, total_kv_blocks=9)
    [(level, what, mend)] = judged(told, block_size=16, total_kv_blocks=9)
    assert (level, mend) == (Level.OK, None)
    assert what == "the engine at http://gpu:8000 has m, blocks of 16 tokens"


def test_what_the_engine_does_not_tell_is_not_judged() -> None:
    [(level, what, _)] = judged(Particulars(), block_size=16, total_kv_blocks=9)
    assert level is Level.OK
    assert what.endswith("has a model that it does not name, no block size told")


def test_another_block_size_is_an_error_that_names_both() -> None:
    [(level, what, mend)] = judged(Particulars(block_size=32), block_size=16)
    assert level is Level.ERROR
    assert "registered with blocks of 16 tokens, the engine has 32" in what
    assert mend is not None
    assert '"block_size": 32' in mend


def test_another_model_and_another_count_of_blocks_are_warnings() -> None:
    told = Particulars(model_name="other", total_kv_blocks=9)
    found = judged(told, block_size=16, total_kv_blocks=8)
    assert [level for level, _, _ in found] == [Level.WARNING, Level.WARNING]
    assert found[1][2] == 'PATCH /workers/7 {"total_kv_blocks": 9}'


def test_a_count_that_was_left_out_is_a_note() -> None:
    [(level, what, _)] = judged(Particulars(total_kv_blocks=9), block_size=16)
    assert level is Level.NOTE
    assert "without total_kv_blocks" in what
