"""What a soak came to, and whether it holds: figures in, a table and an exit status out."""

from collections.abc import Iterable, Sequence

import msgspec

from loadtest.soaking.faults import Injected
from loadtest.soaking.lanes import Report
from loadtest.soaking.watch import Late

MOST_STALL_S = 0.050
MOST_GROWTH = 0.03
_AFTER_S = 0.25  # a stop of the process shows for that much longer: what came meanwhile is answered


class Stalls(msgspec.Struct):
    """Longest stalls in seconds. outside: not injected, less what the machine kept from the process
    or the probe; raw: the same with that; injected: while the process was stopped by us."""

    outside: float = 0.0
    raw: float = 0.0
    injected: float = 0.0
    during: str = ""  # which faults were under way in the first of these, if any
    answers_lost: int = 0  # of the probe


def stalls(
    probe: Iterable[Late],
    control: Iterable[Late],
    stops: Sequence[tuple[float, float]],
    faults: Sequence[tuple[str, float, float]] = (),
) -> Stalls:
    """Tell apart whose stalls they are. Times are monotonic seconds."""
    found, kept = Stalls(), list(control)
    for late in sorted(probe, key=lambda late: late.begin - late.end):  # the longest first
        if late.kind == "lost":
            found.answers_lost += 1
            continue
        length = late.end - late.begin
        if any(begin <= late.end and late.begin <= end + _AFTER_S for begin, end in stops):
            found.injected = max(found.injected, length)
            continue
        found.raw = max(found.raw, length)
        if length <= found.outside:
            continue  # what the machine kept makes it shorter still
        met = [each for each in kept if each.begin <= late.end and late.begin <= each.end]
        woken = sum(
            min(late.end, each.end) - max(late.begin, each.begin)
            for each in met
            if each.kind == "woken"
        )
        starved = sum(each.waited for each in met if each.kind == "starved")
        net = length - max(woken, starved) - late.waited
        if net > found.outside:
            found.outside = net
            names = [name for name, begin, end in faults if begin <= late.end and late.begin <= end]
            found.during = ", ".join(names)
    return found


class Memory(msgspec.Struct):
    """Of the measured process, once so many lifecycles were done, in MB.

    held_mb: what is resident once the C library has handed back what it keeps for later. That is
    some 20 MB or 40, by how high the bursts were that it has met, and what was laid above them.
    None: it could not be asked.
    """

    lifecycles: int
    resident_mb: float
    held_mb: float | None

    @property
    def judged_mb(self) -> float:
        return self.resident_mb if self.held_mb is None else self.held_mb


class Outcome(msgspec.Struct):
    """All figures of a run. memory: at the marks; samples: what was resident, each second. acts,
    nonsense: what those who do not behave did."""

    machine: str
    form: str
    seconds: float
    report: Report
    beside: Report
    stalls: Stalls
    memory: list[Memory]
    samples: list[tuple[int, float]]
    faults: list[Injected]
    acts: dict[str, int]
    nonsense: dict[str, int]
    acts_wrong: list[str]
    loads: list[str]  # what was not zero at the end
    survived: bool
    status: int
    task_failures: int
    tracebacks: int
    judges_times: bool
    problem: str = ""


Row = tuple[str, str, bool | None]  # what, its figure, whether it holds; None: it decides nothing


def growth(marks: Sequence[Memory]) -> float:
    """The greatest change from the first mark, up or down, as its share."""
    return max((abs(mark.judged_mb / marks[0].judged_mb - 1) for mark in marks), default=0.0)


def rows(outcome: Outcome) -> list[Row]:
    """The table."""
    report, fell, beside = outcome.report, outcome.stalls, outcome.beside
    change, judged = growth(outcome.memory), outcome.judges_times
    rate = report.lifecycles / max(outcome.seconds, 1e-9)
    lived = f"{report.lifecycles:,} in {outcome.seconds:,.0f} s ({rate:,.0f} a second)"
    through = f"{beside.lifecycles:,} lifecycles; {beside.let_down:,} calls let down by its kills"
    stall = f"{1e3 * fell.outside:.0f} ms ({1e3 * fell.raw:.0f} ms with what the machine kept)"
    acts = ", ".join(f"{name}: {count:,}" for name, count in sorted(outcome.acts.items()))
    end = f"{'survived' if outcome.survived else 'ended'}; status {outcome.status} of its stop"

    def none(what: str, count: int) -> Row:
        return what, f"{count:,}", count == 0

    found: list[Row] = [
        ("lifecycles", lived, None),
        ("requests", f"{report.requests:,} on {report.connections:,} connections", None),
        ("answers", f"{report.answers:,}", report.answers > 0),
        none("lost answers", report.lost),
        none("wrong answers", report.wrong),
        ("refused while all workers were busy", f"{report.shed:,}", None),
        ("beside, through the second selector", through, None),
        ("those who misbehave", acts, not outcome.acts_wrong),
        ("nonsense on the sockets", f"{sum(outcome.nonsense.values()):,} times", None),
    ]
    for mark in outcome.memory:
        held = "" if mark.held_mb is None else f", of which it holds {mark.held_mb:.1f} MB"
        what = f"resident memory at {mark.lifecycles:,}"
        found.append((what, f"{mark.resident_mb:.1f} MB{held}", None))
    grows, stands = change <= MOST_GROWTH, fell.outside <= MOST_STALL_S
    during = fell.during and f", during: {fell.during}"
    found += [
        ("its change from the first mark", f"{100 * change:.1f} %", grows if judged else None),
        ("worst stall, not injected", stall + during, stands if judged else None),
        ("worst stall, injected", f"{1e3 * fell.injected:.0f} ms", None),
        none("answers that the probe did not get", fell.answers_lost),
    ]
    for fault in outcome.faults:
        if fault.skipped:
            found.append((fault.name, f"skipped: {fault.skipped}", None))
        else:
            told = f", but {'; '.join(fault.failed)}" if fault.failed else ", felt and healed"
            found.append((fault.name, f"{fault.done} times{told}", not fault.failed))
    found += [
        ("load left at the end", "; ".join(outcome.loads) or "none", not outcome.loads),
        none("background tasks that failed", outcome.task_failures),
        none("tracebacks in its log", outcome.tracebacks),
        ("the measured process", end, outcome.survived and outcome.status == 0),
    ]
    if outcome.problem:
        found.append(("the soak itself", outcome.problem, False))
    return found


def table(outcome: Outcome) -> str:
    """Markdown."""
    words = {None: "", True: "holds", False: "FAILS"}
    lines = [f"{outcome.machine}; {outcome.form}", "", "| | | |", "|---|---|---|"]
    lines += [f"| {what} | {figure} | {words[holds]} |" for what, figure, holds in rows(outcome)]
    return "\n".join(lines)


def holds(outcome: Outcome) -> bool:
    return all(holds is not False for _, _, holds in rows(outcome))
