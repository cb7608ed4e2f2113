"""What a source tells its cursor: counts, and stories that the random ones in
tests/properties/test_cursor_model.py do not tell from others.

A story is steps, with `;` between them. `live 0 5` are batches of these numbers, `replay 2-4` such
as come out of a replay, `other 2` is a replayed batch with another content; behind a colon stand
the verdicts (Apply, Ignore, Hold, Restart), where they are not to apply each. `end` and `fail` end
a replay and name the kept batches that are then applied, `held` such that still are. `lost=4` is
what the cursor says by then.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from lean_selector.core.index import kv_cursor
from lean_selector.core.index.kv_cursor import UNSET_SEQ, BatchVerdict, KvCursor, SourceState
from lean_selector.core.index.out_of_turn import Turn

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
    if isinstance(value, Turn):
        return value.name
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
        case "supersede":
            cursor.supersede()
        case "fault":
            cursor.lose(is_missing=True)
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
        "connect; replay_from=None state=connecting; live 0; state=live turn=IN_ORDER"
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
        f"{ASKED} live 5 8; end; ask; replay 4 5: I A; turn=AGAIN"
    ),
    "what came after the first batch is missing, though what came before it is unknown": (
        "connect; live 3; ask; live 5; end; unknown=3 lag=1; ask; fail; state=degraded"
    ),
    "only what was applied early comes again": (
        f"{ASKED} live 5; replay 1-5: I A A A A; turn=AGAIN; live 6: H; end 6; turn=IN_ORDER"
    ),
    "what only the replay has comes once": f"{ASKED} replay 1-5: I A A A A; turn=IN_ORDER",
    "a replay that begins after our only batch leaves a doubt": (
        f"{NEW} live 0; replay 1; lost=1 unknown=0"
    ),
    "a replay that begins late leaves nothing unknown after our only batch": (
        f"{NEW} live 0; replay 2; lost=1 unknown=0"
    ),
    "what was applied live is not lost though the engine has forgotten it": (
        f"{ASKED} live 5; replay 1: I; live 6: H; replay 6; lost=2"  # 2 to 5 rolled out
    ),
    "after a replay that stops what it did not bring is asked for, though nothing is missing": (
        f"{ASKED} replay 1-3: I A A; fail; lag=0 replay_from=3 state=degraded complete_to=None;"
        "ask; replay 3 4: I A; turn=AGAIN; end; state=live complete_to=4"
    ),
    "what was missed behind the first batch is lost though a replay was empty before": (
        f"{NEW} live 0 2; end; ask; replay 2; lost=1 unknown=0"
    ),
    "what an empty replay leaves before the first batch is unknown": (
        "connect; live 3 5; lose; ask; end; lost=2 unknown=3"
    ),
    "what is missing among early batches comes late": (
        f"{ASKED} live 6; turn=EARLY lag=3; replay 1-3: I A A; turn=LATE; replay 4; turn=AGAIN;"
        "replay 5; turn=LATE; replay 6; turn=AGAIN; replay 7; turn=IN_ORDER; end; state=live"
    ),
    "a second replay brings late what the first one has not": (
        f"{ASKED} live 6; replay 1 2: I A; fail 6; turn=AGAIN lag=2 replay_from=2;"
        "ask; replay 2-4: I A A; turn=AGAIN; replay 5; turn=LATE; replay 6; turn=AGAIN; end;"
        "state=live lost=0"
    ),
    "batches missed since the request are late in the next replay": (
        f"{ASKED} live 6; replay 1-4: I A A A; end 6; lost=0 lag=1 replay_from=4;"
        "ask; replay 4-6: I A A; turn=AGAIN; end; state=live"
    ),
    "what a clear in a replay has taken along comes late": (
        f"{ASKED} replay 1 2: I A; clear; lag=2; replay 3 4; turn=LATE; end; state=live"
    ),
    "a clear in a replay without early batches leaves nothing missing": (
        f"{NEW} replay 0 1; clear; lag=0; replay 2; turn=IN_ORDER; end; state=live complete_to=2"
    ),
    "a replay that fails after a clear leaves nothing missing either": (
        f"{NEW} replay 0 1; clear; fail; live 2; turn=IN_ORDER"
    ),
    "after a replay that stops on the way, a batch in order settles nothing": (
        f"{ASKED} replay 1-3: I A A; fail; live 5; is_settled=False"
    ),
    "where a replay replaces all blocks, what came early comes late": (
        f"{NEW} live 3 5; supersede; lag=6; replay 0-3; turn=LATE; replay 4 5; turn=LATE;"
        "replay 6; turn=IN_ORDER; end; state=live lost=0"
    ),
    "where a replay replaces all blocks, nothing else is missing": (
        f"{NEW} supersede; lag=0; replay 0; turn=IN_ORDER"
    ),
    "what is asked for after an empty replay is compared with the batch before": (
        f"{ASKED} live 5 8; end; ask; other 4: R"
    ),
    "a batch that could not be applied early comes late": (
        "live 0 2; fault; lost=1 lag=2; ask; replay 0-2: I A A; turn=LATE"
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


# -- the table of states in the module's docstring -------------------------------------------------

SOURCE = Path(kv_cursor.__file__).with_name("kv_cursor.py")  # beside the compiled module, too
# 0 and 1 were applied; where a replay is due or running, 2 and 3 are missing, and 4 was early.
STATES = {
    "idle": "live 0 1",
    "due": "live 0 1 4",
    "ASKED": ASKED,
    "ANSWERING": f"{ASKED} replay 1: I",
    "CATCHING_UP": f"{ASKED} replay 1-4: I A A A; live 5: H",
}
CALLS: dict[str, Callable[[KvCursor, str], object]] = {
    "connected": lambda cursor, _: cursor.connected(),
    "live, next": lambda cursor, state: live(cursor, {"idle": 2, "CATCHING_UP": 6}.get(state, 5)),
    "live, later": lambda cursor, _: live(cursor, 9),
    "live, older": lambda cursor, _: live(cursor, 1),
    "replay_started": lambda cursor, _: cursor.replay_started(),
    "replayed, next": lambda cursor, _: cursor.replayed(2, b"2"),
    "replayed, other": lambda cursor, _: cursor.replayed(4, b"of another"),
    "replay_finished": lambda cursor, _: cursor.replay_finished(),
    "replay_failed": lambda cursor, _: cursor.replay_failed(),
    "next_held, last": lambda cursor, _: held(cursor),
    "cleared": lambda cursor, _: cursor.cleared(),
}


def live(cursor: KvCursor, seq: int) -> BatchVerdict:
    return cursor.live(seq, b"%d" % seq)


def in_state(state: str) -> KvCursor:
    cursor = play(KvCursor(can_replay=True), STATES[state])
    if state == "CATCHING_UP":
        assert cursor.replay_finished() is IGNORE
    assert state_of(cursor) == state
    return cursor


def state_of(cursor: KvCursor) -> str:
    if cursor._replay is not None:
        return cursor._replay.phase.name
    return "due" if cursor.replay_from is not None else "idle"


def table() -> Iterator[tuple[str, str, str]]:
    lines = SOURCE.read_text().splitlines()  # compiled, the module has no docstring
    head = next(line for line in lines if line.startswith("    call "))
    starts = [head.index(state) for state in STATES]
    rows = lines[lines.index(head) + 1 :]
    for row in rows[: rows.index("")]:
        ends = [*starts[1:], len(row) + 1]
        for state, start, end in zip(STATES, starts, ends, strict=True):
            yield row[: starts[0]].strip(), state, row[start:end].strip()


def test_the_table_has_all_calls() -> None:
    assert list(dict.fromkeys(call for call, _, _ in table())) == list(CALLS)


@pytest.mark.parametrize(("call", "state", "cell"), [row for row in table() if row[2] != "-"])
def test_the_table_is_right(call: str, state: str, cell: str) -> None:
    cursor = in_state(state)
    kept = cursor.held_bytes
    words = [word for word in cell.split(", ") if word]
    verdict = CALLS[call](cursor, state)
    named = [word for word in words if word.upper() in BatchVerdict.__members__]
    if isinstance(verdict, BatchVerdict) and call != "replay_finished":
        assert named == [verdict.name.lower()]
    assert ("kept" in words or "hold" in words) is (cursor.held_bytes > kept)
    assert [*({*words} & {*STATES}), state][0] == state_of(cursor)
    if call == "connected" and "again" in words:
        if state != "CATCHING_UP":
            play(cursor, "replay 1-4: I A A A" if state == "ASKED" else "replay 2-4: A A A")
            cursor.replay_finished()
        held(cursor)
        assert state_of(cursor) == "due"


@pytest.mark.parametrize("state", STATES)
def test_after_the_first_batch_of_a_new_engine_nothing_is_missing(state: str) -> None:
    cursor = in_state(state)
    assert live(cursor, 0) is RESTART
    assert (state_of(cursor), cursor.held_bytes) == ("idle", 0)


# -- live batches that are kept during a replay ----------------------------------------------------


def answered() -> KvCursor:
    return play(KvCursor(can_replay=True), ANSWERED)


@pytest.mark.parametrize(("limit", "value"), [("MAX_HELD", 2), ("MAX_HELD_BYTES", 2)])
def test_batches_kept_beyond_the_limit_leave_a_gap_to_ask_for_again(
    monkeypatch: pytest.MonkeyPatch, limit: Literal["MAX_HELD", "MAX_HELD_BYTES"], value: int
) -> None:
    monkeypatch.setattr(kv_cursor, limit, value)
    cursor = play(answered(), "replay 2-4; live 5-8: H H H H; held_bytes=2 dropped=2")
    play(cursor, "end 7 8; replay_from=4 held_bytes=0")


def test_gaps_beyond_the_limit_are_lost_from_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cursor, "MAX_HOLES", 2)
    cursor = play(KvCursor(can_replay=True), "live 0 3; lose; live 5 7; lost=3 lag=2 gaps=3")
    play(cursor, "ask; replay 0-7: I A A A A A A A; end; lost=3 state=degraded")
    again = play(KvCursor(can_replay=True), "live 0 3 5 7; ask; replay 0 1: I A; turn=AGAIN")
    play(again, "replay 2 3 4; turn=LATE")


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
