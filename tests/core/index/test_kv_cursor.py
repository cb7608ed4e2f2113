"""What a source tells its cursor, story by story; random ones are in
tests/properties/test_cursor_model.py.

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
    "a source is connecting until its first batch": (
        "state=connecting watermark=None; live 0-2; state=live watermark=2 last_live=2"
    ),
    "a gap is lost, and what is lost adds up until a restart": (
        "live 0 5; lost=4 gaps=1 state=degraded replay_from=None; live 8; lost=6 gaps=2;"
        "lose; lose; lost=8; live 0 0: R R; lost=0 restarts=2 state=live"
    ),
    "a clear makes what was missing before it irrelevant": "live 0 3; clear; state=live",
    "the largest number is applied and leaves a fresh cursor": (
        "live 0 1 LARGEST; watermark=None last_live=None; live 0 1"
    ),
    "an engine that counts from one has lost nothing": (
        "live 1 2; state=live gaps=0; live 1: R; state=live"
    ),
    "what came before a first number beyond one is unknown": (
        "live 2; unknown=2 lost=0 state=no_replay"
    ),
    "nobody is asked": "connect; replay_from=None state=connecting; live 0; state=live",
}

WITH_REPLAY = {
    # A gap, and its replay
    "a first batch beyond zero is a gap from zero": "live 7; replay_from=0 lag=7 state=replaying",
    "a full replay brings the source back": (
        f"{ANSWERED} replay_from=None; replay 2-4; state=replaying; end;"
        "state=live watermark=4 replayed_batches=3 restarts=0; live 5"
    ),
    "live batches are applied while nobody answers": (
        f"{ASKED} live 5 6; fail; state=degraded replay_from=1 watermark=6; live 7"
    ),
    "what a replay does not carry is applied again after it": (
        f"{ASKED} live 5 6; replay 1-5: I A A A A; live 7: H; lag=5; end 6 7;"
        "state=live watermark=7 lag=0"
    ),
    "live duplicates of replayed batches are ignored": (
        f"{ANSWERED} replay 2-6; end; live 5 6 7: I I A; restarts=0"
    ),
    "a replay that repeats itself is applied once": f"{ANSWERED} replay 2 2 3 LARGEST 4: A I A I A",
    "batches that the engine has forgotten are lost": (
        f"{ANSWERED} replay 3 4; end; lost=1 state=degraded replay_from=None"
    ),
    "an empty replay loses the gap and is not repeated": (
        f"{ASKED} end; lost=2 lag=0 replay_from=None watermark=4"
    ),
    "a replay that stops midway is asked for again from there": (
        f"{ASKED} live 5; replay 1 2: I A; fail 5; replay_from=2 state=degraded watermark=5;"
        "ask; replay 2-5: I A A A; end; state=live"
    ),
    "a replay short of nothing but its end marker is complete": (
        f"{ANSWERED} replay 2-4; fail; state=live"
    ),
    "a second gap during a replay is asked for after it": (
        f"{ANSWERED} replay 2-4; live 7: H; end 7; replay_from=4 gaps=2"
    ),
    "a second gap before the replay answers is part of it": (
        f"{ASKED} live 6; lag=3; replay 1-6: I A A A A A; end; state=live"
    ),
    "an empty replay says nothing of gaps that came after it was asked for": (
        f"{NEW} live 0-2 9 10; end; lost=0 unknown=0 lag=6 replay_from=0;"
        "ask; replay 0-10; end; state=live watermark=10"
    ),
    "an engine that has not even our last batch is another, whatever was heard since": (
        f"{FOLLOWED} {NEW} live 6; end: R; restarts=1 lost=0 replay_from=0"
    ),
    "the newest batch is compared where nothing before the gap is known": (
        "live 2; ask; replay 0 1; other 2: R; restarts=1 replay_from=0"
    ),
    "batches that rolled out while others were heard are counted": (
        "live 0 1 4; ask; replay 7; lost=4"  # 2 and 3, and 5 and 6, which were never heard of
    ),
    "a buffer that begins behind the newest batch leaves a doubt": (
        "live 2; ask; replay 3; lost=1 unknown=2"
    ),
    "but not one before the first batch": f"{NEW} live 9; end; ask; fail; state=no_replay lag=9",
    "a first batch that nobody answers for any more is not known of": (
        f"{NEW} live 9; end; lost=0 unknown=0 lag=9 state=replaying;"
        "ask; end; lost=0 unknown=9 lag=0 state=partial replay_from=None"
    ),
    "an empty replay loses what was missing and not what has been since": (
        f"{ASKED} live 5 8; end; lost=2 lag=2 replay_from=4; ask; end;lost=4 lag=0 replay_from=None"
    ),
    "what was applied live is not lost though the engine has forgotten it": (
        f"{ASKED} live 5; replay 1: I; live 6: H; replay 6; lost=2"  # 2 to 5 rolled out
    ),
    "after a replay that stops only what it did not bring is missing": (
        f"{ASKED} replay 1-3: I A A; fail; lag=1 replay_from=3 state=degraded"
    ),
    "a single batch that no replay brought degrades": ("live 0 2; ask; fail; lag=1 state=degraded"),
    "a replay that ends before what was heard leaves batches out of order": (
        f"{ASKED} live 5; replay 1-3: I A A; end 5; lost=1 state=degraded watermark=5"
    ),
    "what was missed behind the first batch is lost and not unknown": (
        "connect; live 1 3; ask; replay 3; lost=1 unknown=1; end; state=degraded"
    ),
    "also where one was empty before": f"{NEW} live 0 2; end; ask; replay 2; lost=1 unknown=0",
    "also where the replay is empty": "connect; live 3 5; ask; end; lost=1 unknown=3",
    "a replay that begins at one is whole": (
        "live 1; replay_from=0; ask; replay 1; end; state=live lost=0"
    ),
    "a replay that begins beyond one is not": (
        "live 2; ask; replay 2; end; unknown=2 lost=0 state=partial"
    ),
    # What is lost
    "an undecodable batch degrades the source": "live 0; lose; state=degraded; live 1",
    "forgotten batches add to what was lost before": f"{ANSWERED} lose; replay 3 4; lost=2",
    "a batch that cannot be compared adds to it": f"{ASKED} lose; replay 2; lost=2",
    "an empty replay adds to it": f"{ASKED} lose; end; lost=3",
    "a replay that ends early adds to it": f"{ASKED} lose; replay 1-3: I A A; end; lost=2",
    # Whoever asked has failed
    "a replay whose asker has failed is one that failed": (
        f"{ASKED} interrupt; replay_from=1 state=degraded"
    ),
    "also one that had begun": (
        f"{ASKED} replay 1 2: I A; interrupt; replay_from=2 state=degraded"
    ),
    # Another publisher
    "a number that does not grow is a new publisher": (
        "live 0-2; live 2: R; replay_from=0 restarts=1; ask; replay 0; live 0: R;"
        "is_settled=True state=live watermark=0; replay 1: I"
    ),
    "another batch under a number that we have is a new publisher": (
        f"{ASKED} live 5; other 1: R; restarts=1 lost=0 lag=6 replay_from=0 state=replaying;"
        "live 6; ask; replay 0-6; end; state=live watermark=6 lag=0"
    ),
    "an engine that replays more than was asked for is compared too": (
        f"{ASKED} replay 0: I; other 1: R"
    ),
    "a batch is compared once": f"{ANSWERED} other 1: I; replay 2; other 2: I; restarts=0",
    "a replay that fails leaves the batch to compare": (
        f"{ANSWERED} replay 2; fail; replay_from=2; ask; other 2: R"
    ),
    "a buffer that has rolled past what we have vouches for nothing": (
        f"{ASKED} replay 2-4; end; lost=1 state=degraded"
    ),
    # A clear
    "a clear makes what was missing before it irrelevant": (
        "live 0 3; clear; is_settled=True state=live lag=0"
    ),
    "a clear ends a replay that nobody has answered": (
        f"{ASKED} live 5; clear; is_settled=True; held"
    ),
    "a clear within a replay leaves it running": (
        f"{ANSWERED} replay 3; lost=1; clear; lost=0 is_settled=False"
    ),
    "a clear leaves nothing to be asked for though the connection is new": (
        f"{ASKED} connect; live 5 6; held_bytes=2; clear; held;"
        "held_bytes=0 replay_from=None is_settled=True"
    ),
    "a clear leaves no doubt of what was applied before it": (
        "live 0; connect; ask; fail; live 1; clear; live 3; replay_from=1; ask;"
        "replay 1-3: I A A; end; lost=0 state=live"
    ),
    # A recovered index
    "a recovered source goes on behind its watermark": "resume 41; live 42; state=live",
    "a recovered source asks for what is missing and has nothing to compare": (
        "resume 41; live 45; replay_from=41; ask; other 41: I; replay 42-45; end; state=live"
    ),
    "a recovered source notices that its engine is a new one": (
        "resume 41; live 41: R; replay_from=0"
    ),
    "a recovered source asks from its watermark on": (
        f"resume 41; {NEW} replay 41-43: I A A; end; state=live watermark=43 unknown=0"
    ),
    "a recovered source whose engine began again meanwhile starts over": (
        f"resume 41; {NEW} end: R; replay_from=0"
    ),
    # A new connection
    "a new source asks for everything without having heard anything": (
        "is_settled=True; connect; state=replaying lag=0 replay_from=0; ask; replay 0-2; end;"
        "state=live watermark=2 complete_to=2 last_live=None gaps=0 has_told=True"
    ),
    "what the replay brought too is ignored live and what follows is not": (
        f"{NEW} replay 0-2; live 1: H; end; live 2 3: I A; restarts=0 watermark=3"
    ),
    "an engine with nothing to tell is silent until it does": (
        f"{NEW} end; state=silent has_told=False is_settled=True; live 0; state=live"
    ),
    "a replay that begins at one is not partial": (
        f"{NEW} replay 1 2; end; unknown=0 lost=0 state=live; live 3; state=live complete_to=3"
    ),
    "a replay that begins late is partial until a clear": (
        f"{NEW} replay 2 3; end; unknown=2 lost=0 state=partial; live 4;"
        "state=partial complete_to=4; clear; unknown=0 state=live"
    ),
    "a live batch that is faster than the replay changes nothing": (
        f"{NEW} live 500; replay 400-500; end; unknown=400 lost=0 watermark=500 state=partial"
    ),
    "a replay that nobody answers is asked for until it is of no matter": (
        f"{NEW} fail; state=no_replay is_settled=False; live 0; state=live is_settled=True"
    ),
    "without an answer what came before is unknown and gaps degrade": (
        f"{NEW} fail; live 500 501; state=no_replay replay_from=0 complete_to=None;"
        "live 503; state=degraded"
    ),
    "a replay that stops is taken up there though nothing beyond was heard of": (
        f"{NEW} replay 0-2; fail; replay_from=2; ask; replay 2-4: I A A; end;state=live watermark=4"
    ),
    "a connection that came back is asked for what it missed": (
        f"{FOLLOWED} state=live watermark=4 gaps=0; live 5"
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
    "a connection that is new while a replay runs is asked after it": (
        f"{ANSWERED} replay 2-4; connect; end; replay_from=4; ask; replay 4 5: I A; end;"
        "state=live is_settled=True"
    ),
    "what is only asked for does not keep an index from being recovered": (
        f"{FOLLOWED} {NEW} complete_to=4; fail; complete_to=4 state=no_replay"
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


def test_what_is_kept_is_counted_until_it_is_applied() -> None:
    cursor = play(answered(), "live 10-12: H H H; replay 2-9")
    cursor.replay_finished()
    left = []
    while cursor.next_held() is not None:
        left.append(cursor.held_bytes)
    assert left == [4, 2, 0]


def test_a_replay_that_has_ended_leaves_what_was_kept_to_whoever_finds_its_asker_gone() -> None:
    cursor = play(answered(), "replay 2-4; live 5: H")
    cursor.replay_finished()
    play(cursor, "interrupt 5")
    assert not cursor.replay_interrupted()
    assert cursor.state is SourceState.LIVE
