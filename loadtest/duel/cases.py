"""The catalogue of cases over HTTP: which requests, how many, against which fleet.

A stage is a set of cases that share their processes. How a case is run is `stages`'s; the index's
own cases are in `index_stages`.
"""

from pathlib import Path

import msgspec

from loadtest.duel.targets import Target

BLOCK_SIZE = 16  # tokens, where a stage does not say otherwise
OPEN_RATE = 1_000.0  # selections a second
_FEW = 0.2  # of the holdings, where it is not the index that is compared


class Plan(msgspec.Struct, frozen=True):
    """How much of everything: the default, or tiny for --quick."""

    targets: list[Target]
    trace: Path | None
    rounds: int
    holdings: int = 500_000  # blocks of BLOCK_SIZE in the index, each engine's counted
    many_holdings: int = 1_000_000
    share: float = 1.0  # of the requests of a round
    most_workers: int = 4_096
    open_seconds: float = 2.1  # of each round; times 1 000 a second: 10 500 requests in 5 rounds
    open_rounds: int = 5  # of cases with a rate, however few the others have
    churn_seconds: float = 6.0
    idle_seconds: float = 0.5  # in which a process has nothing to do
    index_rounds: int = 3

    def rounds_of(self, case: "Case") -> int:
        return self.rounds if case.rate is None else self.open_rounds


class Case(msgspec.Struct, frozen=True):
    """One row of the tables.

    blocks: length of the prompts, None for the trace's own. prompts: how many in a round.
    events: the engines store EVENTS_PER_S meanwhile. rate: requests a second, None for closed load.
    client: our own client sends, over `tcp` or `unix` (which only we serve); empty for wrk.
    asks: what else stands in the body of a select.
    """

    name: str
    kind: str  # select, lifecycle, msgpack
    blocks: int | None
    prompts: int
    events: bool = False
    rate: float | None = None
    client: str = ""
    asks: dict[str, object] = {}


class Stage(msgspec.Struct, frozen=True):
    """Cases that share their processes.

    one_core: every service runs on one and the same CPU, the client on the others. replicas: every
    service has a second of its kind as its peer. process: a row says what the processes take.
    options: environment of the services, in the names that all of them know. loaded: every worker
    has reservations, no two the same load. offloads: the engines keep what they store on their
    hosts too, and half of it only there. opening: every prompt of a chosen length begins with the
    same blocks, of which all engines have two on their devices and the others on their hosts.
    listens: to engines; if not, nothing is cached. share: of the holdings.
    """

    workers: int
    cases: list[Case]
    block_size: int = BLOCK_SIZE
    one_core: bool = False
    replicas: bool = False
    process: bool = False
    options: dict[str, str] = {}
    loaded: bool = False
    offloads: bool = False
    opening: bool = False
    listens: bool = True
    share: float = 1.0

    @property
    def process_case(self) -> str:
        return f"process, {self.workers} workers"

    def names(self) -> list[str]:
        """Of everything that a run of this stage can tell."""
        return [case.name for case in self.cases] + [self.process_case] * self.process


def stages(plan: Plan) -> list[Stage]:
    """All stages over HTTP. The requests of a round are a tenth of a second of work or more."""

    def select(blocks: int | None, workers: int, prompts: int, size: int = BLOCK_SIZE) -> Case:
        what = f"{blocks} blocks" if blocks else f"trace prompts at {size}"
        return Case(f"select, {what}, {workers} workers", "select", blocks, prompts)

    traced = "trace prompts at 16"
    # The trace has 12 031 requests; the index takes the first 600 to 900, and no case may use one
    # twice: prompts x rounds of a stage stay below 11 000, at 5 rounds.
    short = [select(8, 16, 20_000), select(64, 16, 10_000), select(512, 16, 2_000)]
    long = [select(4_096, 16, 300), select(None, 16, 2_000)]
    mixed = [
        Case("lifecycle, 8 blocks, 16 workers", "lifecycle", 8, 8_000),
        Case(f"lifecycle, {traced}, 16 workers", "lifecycle", None, 730),
        Case(f"select while ingesting, {traced}, 16 workers", "select", None, 730, events=True),
        Case(f"select as msgpack, {traced}, 16 workers", "msgpack", None, 730),
    ]
    by_client = [
        Case(
            f"select by our client over {words}, 8 blocks, 16 workers",
            "select",
            8,
            6_000,
            client=to,
        )
        for to, words in (("tcp", "TCP"), ("unix", "a UNIX socket"))
    ]
    fixed_name = f"select at a fixed rate while ingesting, {traced}, 16 workers"
    open_prompts = round(OPEN_RATE * plan.open_seconds)
    fixed = Case(fixed_name, "select", None, open_prompts, events=True, rate=OPEN_RATE)
    one_core = Case("select on one core, 8 blocks, 16 workers", "select", 8, 20_000)
    synced = Case(f"lifecycle with a replica, {traced}, 16 workers", "lifecycle", None, 900)
    return [
        Stage(16, [*short, *long], process=True),
        Stage(16, [*mixed, *by_client]),
        Stage(16, [fixed]),
        Stage(16, [select(None, 16, 2_000, 64)], block_size=64),
        Stage(16, [one_core], one_core=True),
        Stage(16, [synced], replicas=True),
        Stage(1, [select(8, 1, 20_000), select(None, 1, 1_000)]),
        Stage(128, [select(8, 128, 20_000), select(None, 128, 1_000)]),
        Stage(512, [select(8, 512, 10_000), select(None, 512, 1_000)], process=True),
        *_option_stages(),
        *(
            Stage(n, [_loaded(n, "no events")], loaded=True, listens=False, options=_DEAF)
            for n in (16, 4_096)
        ),
    ]


# Every option of a selection that makes it differ by worker: in the body, or for the whole process.
_ASKED: dict[str, dict[str, object]] = {
    "nothing": {},
    "temperature": {"router_config_override": {"router_temperature": 0.5}},
    "allowed workers": {"allowed_worker_ids": list(range(1, 513, 8))},
    "required taint": {"routing_constraints": {"required_taints": ["zone-1"]}},
    "preferred taints": {
        "routing_constraints": {"preferred_taints": {"zone-1": 0.5, "zone-2": -0.5}}
    },
}
_DEAF = {"DYN_USE_KV_EVENTS": "false"}
_SET: dict[str, dict[str, str]] = {
    "queue threshold": {"DYN_ROUTER_QUEUE_THRESHOLD": "16"},
    "credit decay": {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": "0.5"},
}


def with_option(option: str, workers: int = 512) -> str:
    """The name of the case of a select with an option, "nothing" being one."""
    return f"select with {option}, 8 blocks, {workers} loaded workers"


def _loaded(workers: int, option: str, asks: dict[str, object] | None = None) -> Case:
    return Case(with_option(option, workers), "select", 8, 10_000, asks=asks or {})


def _option_stages() -> list[Stage]:
    """Each option at 512 ranks, where no two have the same load; the first is without any."""
    asked = [_loaded(512, option, asks) for option, asks in _ASKED.items()]
    return [
        Stage(512, asked, loaded=True, share=_FEW),
        *(
            Stage(512, [_loaded(512, option)], options=options, loaded=True, share=_FEW)
            for option, options in _SET.items()
        ),
        Stage(512, [_loaded(512, "lower tiers")], loaded=True, offloads=True, share=_FEW),
        Stage(512, [_loaded(512, "shared host blocks")], loaded=True, opening=True, share=_FEW),
    ]
