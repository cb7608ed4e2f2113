"""What a source tells its cursor: counts, and stories that the random ones in
tests/properties/test_cursor_model.py do not tell from others.

A story is steps, with `;` between them. `live 0 5` are batches of these numbers, `replay 2-4` such
as come out of a replay, `other 2` is a replayed batch with another content; behind a colon stand
the verdicts (Apply, Ignore, Hold, Restart), where they are not to apply each. `end` and `fail` end
a replay and name the kept batches that are then applied, `held` such that still are. `lost=4` is
what the cursor says by then.
"""

from collections.abc import Iterator
from typing import Literal

import pytest

from lean_selector.core.index import kv_cursor
from lean_selector.core.index.kv_cursor import UNSET_SEQ, BatchVerdict, KvCursor, SourceState

VERDICTS = {verdict.name[0]: verdict for verdict in BatchVerdict}
APPLY, IGNORE, RESTART = VERDICTS["A"], VERDICTS["I"], VERDICTS["R"]


def held(cursor: KvCursor) -> list[int]:
    return [int(payload) for payload in iter(cursor.next_held, None)]


def numbers_of(words: list[str]) -> Iterator[int]:
    for word in words:
        first, _, last = word.replace("LARGEST", str(UNSET_SEQ)).partition("-")
        yield from range(int(first), int(last or first) + 1)


def judge(cursor: KvCursor, verb: str, numbers: list[int]) -> list[BatchVerdict]:
    if verb == "live":
        return [cursor.live(seq, b"%d" % seq) for seq in numbers]
    if verb == "replay":
        return [cursor.replayed(seq, b"%d" % seq) for seq in numbers]
    return [cursor.replayed(seq, b"of another") for seq in numbers]


def said(cursor: KvCursor, name: str) -> object:
    value = getattr(cursor, name)
    return value.value if isinstance(value, SourceState) else value


def tell(cursor: KvCursor, step: str) -> None:
    head, _, expected = step.partition(":")
    verb, *words = head.split()
    if "=" in verb:
        names = [word.partition("=")[0] for word in (verb, *words)]
        assert " ".join(f"{name}={said(cursor, name)}" for name in names) == head.strip()
        return
    numbers = list(numbers_of(words))
    match verb:
        case "live" | "replay" | "other":
            verdicts = [VERDICTS[name] for name in expected.split()] or [APPLY] * len(numbers)
            assert judge(cursor, verb, numbers) == verdicts
        case "ask":
            cursor.replay_started()
        case "end":
            verdict = cursor.replay_finished()
            assert verdict is (RESTART if expected else IGNORE)
            assert expected or held(cursor) == numbers
        case "fail":
            cursor.replay_failed()
            assert held(cursor) == numbers
        case "interrupt":
            assert cursor.replay_interrupted()
            assert held(cursor) == numbers
        case "held":
            assert held(cursor) == numbers
        case "resume":
            cursor.resume_at(*numbers)
        case _:
            {"connect": cursor.connected, "clear": cursor.cleared, "lose": cursor.lose}[verb]()


def play(cursor: KvCursor, story: str) -> KvCursor:
    for step in filter(str.strip, story.replace("\n", " ").split(";")):
        tell(cursor, step)
    return cursor


# 0 and 1 applied, 2 and 3 missing, 4 applied; the replay requested, from 1 on.
ASKED = "live 0 1 4; replay_from=1; ask;"
ANSWERED = ASKED + "replay 1: I;"
NEW = "connect; ask;"
# 0 to 2 heard live, 3 and 4 out of a replay after the connection was lost.
FOLLOWED = "live 0-2; connect; replay_from=2; ask; replay 2-4: I A A; end;"

WITHOUT_REPLAY = {
    "a gap is lost, and what is lost adds up until a restart": (
        "live 0 5; lost=4 gaps=1 state=degraded replay_from=None; live 8; lost=6 gaps=2;"
        "lose; lose; lost=8; live 0 0: R R; lost=0 restarts=2 state=live"
    ),
    "the largest number is applied and leaves a fresh cursor": (
        "live 0 1 LARGEST; watermark=None last_live=None; live 0 1"
    ),
    "what came before a first number beyond one is unknown": (
        "live 2; unknown=2 lost=0 state=no_replay"
    ),
    "nobody is asked": (
        "connect; replay_from=None state=connecting; live 0; state=live is_again=False"
    ),
}

WITH_REPLAY = {
    # A gap, and its replay
    "a full replay brings the source back": (
        f"{ANSWERED} replay_from=None; replay 2-4; state=replaying; end;"
        "state=live watermark=4 replayed_batches=3 restarts=0; live 5"
    ),
    "a replay that repeats itself is applied once": f"{ANSWERED} replay 2 2 3 LARGEST 4: A I A I A",
    "a replay short of nothing but its end marker is complete": (
        f"{ANSWERED} replay 2-4; fail; state=live"
    ),
    "an empty replay says nothing of gaps that came after it was asked for": (
        f"{NEW} live 0-2 9 10; end; lost=0 unknown=0 lag=6 replay_from=0;"
        "ask; replay 0-10; end; state=live watermark=10"
    ),
    "an engine that has not even our last batch is another, whatever was heard since": (
        f"{FOLLOWED} {NEW} live 6; end: R; restarts=1 lost=0 replay_from=0"
    ),
    "the newest batch is compared where nothing before the gap is known": (
        "live 2; ask; replay 0 1; other 2: R; restarts=1 replay_from=0; ask; replay 0"
    ),
    "a buffer that begins behind the newest batch leaves a doubt": (
        "live 2; ask; replay 3; lost=1 unknown=2"
    ),
    "a first batch whose replay fails leaves no doubt": (
        f"{NEW} live 9; end; ask; fail; state=no_replay lag=9"
    ),
    "an empty replay loses what was missing and not what has been since": (
        f"{ASKED} live 5 8; end; lost=2 lag=2 replay_from=4; ask; end;lost=4 lag=0 replay_from=None"
    ),
    "what was applied before an empty replay may come again in the next one": (
        f"{ASKED} live 5 8; end; ask; replay 4 5: I A; is_again=True"
    ),
    "what came after the first batch is missing, though what came before it is unknown": (
        "connect; live 3; ask; live 5; end; unknown=3 lag=1; ask; fail; state=degraded"
    ),
    "only what was applied early comes again": (
        f"{ASKED} live 5; replay 1-5: I A A A A; is_again=True; live 6: H; end 6; is_again=False"
    ),
    "what only the replay has comes once": f"{ASKED} replay 1-5: I A A A A; is_again=False",
    "a replay that begins after our only batch leaves a doubt": (
        f"{NEW} live 0; replay 1; lost=1 unknown=0"
    ),
    "a replay that begins late leaves nothing unknown after our only batch": (
        f"{NEW} live 0; replay 2; lost=1 unknown=0"
    ),
    "what was applied live is not lost though the engine has forgotten it": (
        f"{ASKED} live 5; replay 1: I; live 6: H; replay 6; lost=2"  # 2 to 5 rolled out
    ),
    "after a replay that stops only what it did not bring is missing": (
        f"{ASKED} replay 1-3: I A A; fail; lag=1 replay_from=3 state=degraded"
    ),
    "what was missed behind the first batch is lost though a replay was empty before": (
        f"{NEW} live 0 2; end; ask; replay 2; lost=1 unknown=0"
    ),
    "what an empty replay leaves before the first batch is unknown": (
        "connect; live 3 5; lose; ask; end; lost=2 unknown=3"
    ),
    # What is lost
    "a batch that cannot be compared adds to what was lost": f"{ASKED} lose; replay 2; lost=2",
    "a replay that ends early adds to what was lost": (
        f"{ASKED} lose; replay 1-3: I A A; end; lost=2"
    ),
    # Whoever asked has failed
    "a replay whose asker has failed is one that failed": (
        f"{ASKED} interrupt; replay_from=1 state=degraded"
    ),
    "also one that had begun": (
        f"{ASKED} replay 1 2: I A; interrupt; replay_from=2 state=degraded"
    ),
    # Another publisher
    "another batch under a number that we have is a new publisher": (
        f"{ASKED} live 5; other 1: R; restarts=1 lost=0 lag=6 replay_from=0 state=replaying;"
        "live 6; ask; replay 0-6; end; state=live watermark=6 lag=0"
    ),
    "an engine that replays more than was asked for is compared too": (
        f"{ASKED} replay 0: I; other 1: R"
    ),
    "a replay that fails leaves the batch to compare": (
        f"{ANSWERED} replay 2; fail; replay_from=2; ask; other 2: R"
    ),
    # A clear
    "a clear makes what was missing before it irrelevant": (
        "live 0 3; clear; is_settled=True state=live lag=0"
    ),
    "a clear ends a replay that nobody has answered": (
        f"{ASKED} live 5; clear; is_settled=True; held"
    ),
    "a clear leaves nothing to be asked for though the connection is new": (
        f"{ASKED} connect; live 5 6; held_bytes=2; clear; held;"
        "held_bytes=0 replay_from=None is_settled=True"
    ),
    "a clear leaves no doubt of what was applied before it": (
        "live 0; connect; ask; fail; live 1; clear; live 3; replay_from=1; ask;"
        "replay 1-3: I A A; end; lost=0 state=live"
    ),
    "a clear leaves the batch before it to be compared": (
        "live 0; connect; ask; fail; live 1; clear; connect; replay_from=1; ask; replay 1-3: I A A"
    ),
    "a clear leaves an empty replay no reason to see another engine": (
        "live 0; connect; ask; fail; live 1; clear; live 3; ask; end; restarts=0 lost=1"
    ),
    # A recovered index
    "a recovered source asks from its watermark on": (
        f"resume 41; {NEW} replay 41-43: I A A; end; state=live watermark=43 unknown=0"
    ),
    "a recovered source whose engine began again meanwhile starts over": (
        f"resume 41; {NEW} end: R; replay_from=0"
    ),
    # A new connection
    "a replay that begins at one is not partial": (
        f"{NEW} replay 1 2; end; unknown=0 lost=0 state=live; live 3; state=live complete_to=3"
    ),
    "a replay that begins late is partial until a clear": (
        f"{NEW} replay 2 3; end; unknown=2 lost=0 state=partial; live 4;"
        "state=partial complete_to=4; clear; unknown=0 state=live"
    ),
    "a replay that nobody answers is asked for until it is of no matter": (
        f"{NEW} fail; state=no_replay is_settled=False; live 0; state=live is_settled=True"
    ),
    "an engine that has not even our last batch is another": (
        f"{FOLLOWED} {NEW} end: R; restarts=1 replay_from=0 watermark=None;"
        "ask; replay 0; end; state=live watermark=0"
    ),
    "an engine with another batch under our number is another": (
        f"{FOLLOWED} {NEW} other 4: R; restarts=1 replay_from=0 lag=0"
    ),
    "a number that we have is a new publisher's once the connection is new": (
        f"{FOLLOWED} connect; live 4: R; replay_from=0"
    ),
    "what rolled out of the buffer while the connection was lost degrades": (
        f"{FOLLOWED} {NEW} replay 8 9; end; lost=3 state=degraded watermark=9"
    ),
    "an engine that lacks our last batch before the gap is another": (
        "live 0; connect; live 2; ask; end: R; restarts=1"
    ),
    "an empty replay from before the connection does not tell of another engine": (
        f"{ASKED} connect; end; restarts=0 lost=2 replay_from=4"
    ),
    "a connection that is new while a replay runs is asked after it": (
        f"{ANSWERED} replay 2-4; connect; end; replay_from=4; ask; replay 4 5: I A; end;"
        "state=live is_settled=True"
    ),
}


@pytest.mark.parametrize("story", WITHOUT_REPLAY.values(), ids=WITHOUT_REPLAY)
def test_without_a_replay_endpoint(story: str) -> None:
    play(KvCursor(can_replay=False), story)


@pytest.mark.parametrize("story", WITH_REPLAY.values(), ids=WITH_REPLAY)
def test_with_a_replay_endpoint(story: str) -> None:
    play(KvCursor(can_replay=True), story)


# -- live batches that are kept during a replay ---------------------------------------------------


def answered() -> KvCursor:
    return play(KvCursor(can_replay=True), ANSWERED)


@pytest.mark.parametrize(("limit", "value"), [("MAX_HELD", 2), ("MAX_HELD_BYTES", 2)])
def test_batches_kept_beyond_the_limit_leave_a_gap_to_ask_for_again(
    monkeypatch: pytest.MonkeyPatch, limit: Literal["MAX_HELD", "MAX_HELD_BYTES"], value: int
) -> None:
    monkeypatch.setattr(kv_cursor, limit, value)
    cursor = play(answered(), "replay 2-4; live 5-8: H H H H; held_bytes=2 dropped=2")
    play(cursor, "end 7 8; replay_from=4 held_bytes=0")


def test_what_is_kept_is_given_up_from_the_oldest_but_for_the_newest() -> None:
    cursor = answered()
    for seq, size in ((5, 10), (6, 20), (7, 30), (8, 40)):
        cursor.live(seq, b"%0*d" % (size, seq))
    for size, held_bytes, dropped in ((10, 90, 1), (11, 70, 2), (30, 40, 3), (1_000, 40, 3)):
        cursor.shed(size)
        assert (cursor.held_bytes, cursor.dropped) == (held_bytes, dropped)
    play(cursor, "replay 2-4; end 8; gaps=2 replay_from=4")


def test_a_replay_that_has_ended_leaves_what_was_kept_to_whoever_finds_its_asker_gone() -> None:
    cursor = play(answered(), "replay 2-4; live 5: H")
    cursor.replay_finished()
    play(cursor, "interrupt 5")
    assert not cursor.replay_interrupted()
    assert cursor.state is SourceState.LIVE
