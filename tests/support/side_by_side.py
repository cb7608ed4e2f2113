"""A reference and ours side by side: every step is taken by both, and their answers are compared.

A step is plain data, so a run is a list that can be printed. Engines stand in a step by number:
`tcp://engine-3`.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from lean_selector.publisher import KvEventPublisher
from loadtest.child_service import JSON, ChildService, free_port, plain_environment
from tests.support.recorded_cases import replay
from tests.support.running_service import DEADLINE_S

BLOCK_SIZE = 4
Step = dict[str, Any]
Answer = tuple[int, Any]
Pair = tuple[ChildService, ChildService]
# Makes an answer of the reference what a decision wants of it, given the step.
Amend = Callable[[Step, int, str], tuple[int, str]]


def as_it_is(_: Step, status: int, text: str) -> tuple[int, str]:
    return status, text


def engine(worker_id: int) -> str:
    return f"tcp://engine-{worker_id}"


class Different(Exception):
    """The step, what the reference said and what ours did."""


class SideBySide:
    """Both services, the reference first. `log` has all steps so far, `compared` counts answers.

    Taking a step raises Different where it is answered differently.
    """

    def __init__(
        self, services: Pair, engines: Iterable[int] = (), amend: Amend = as_it_is
    ) -> None:
        self.services = services
        self.log: list[Step] = []
        self.compared = 0
        self._amend = amend
        self._heard = 0
        self._engines = {
            worker_id: KvEventPublisher(
                worker_id=worker_id, kv_block_size=BLOCK_SIZE, endpoint="tcp://127.0.0.1:*"
            )
            for worker_id in engines
        }

    def close(self) -> None:
        for publisher in self._engines.values():
            publisher.close()

    def take(self, step: Step) -> Answer | None:
        """Takes a step of any kind, for its `do`; the reference's answer where there is one."""
        self.log.append(step)
        act: Callable[[Step], Answer | None] = getattr(self, "_" + step["do"])
        return act(step)

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        """Theirs, after ours was compared with it."""
        answer = self.take({"do": "ask", "method": method, "path": path, "body": body})
        assert answer is not None
        return answer

    def raw(self, service: ChildService, method: str, path: str, body: object) -> tuple[int, str]:
        """One service alone; nothing is compared or remembered."""
        content = None if body is None else self._text(body)
        status, text = service.request(method, path, content, JSON if content else {})
        return status, text.decode()

    def ours(self, method: str, path: str, body: object = None) -> Answer:
        status, text = self.raw(self.services[1], method, path, body)
        return status, json.loads(text)

    def _text(self, body: object) -> bytes:
        text = json.dumps(body)
        for worker_id, publisher in self._engines.items():
            text = text.replace(f'"{engine(worker_id)}"', f'"{publisher.endpoint}"')
        return text.encode()

    def _differ(self, step: Step, theirs: object, ours: object) -> NoReturn:
        for service in self.services:  # a port that somebody else was faster to take
            assert service.process.poll() is None, f"a service has ended: {service.log()}"
        raise Different(f"{json.dumps(step)}\n  theirs {theirs}\n  ours   {ours}")

    # -- what a step does --------------------------------------------------------------------------

    def _ask(self, step: Step) -> Answer:
        method, path, body = step["method"], step["path"], step["body"]
        theirs, ours = (self.raw(each, method, path, body) for each in self.services)
        theirs = self._amend(step, *theirs)
        self.compared += 1
        recorded = {"method": method, "status": theirs[0], "response_body": theirs[1]}
        if replay.differs(recorded, *ours):
            self._differ(step, theirs, ours)
        try:
            return theirs[0], json.loads(theirs[1])
        except ValueError:
            return theirs[0], theirs[1]  # plain text, of a bad path or query

    def _tie(self, step: Step) -> None:
        """Among equals each draws for itself; both draw one of those that are equally good."""
        self.compared += 1
        for service in self.services:
            status, text = self.raw(service, "POST", "/select", step["body"])
            chosen = json.loads(text)
            if (
                status != 200
                or [chosen["worker_id"], chosen.get("dp_rank")] not in self._tied(step["body"])[1]
            ):
                self._differ(step, f"one of {self._tied(step['body'])[1]}", text)

    def _tied(self, body: dict[str, object]) -> tuple[int, list[list[int]]]:
        """How many ranks ours finds equally good, and which."""
        status, answer = self.ours("POST", "/select", {**body, "explain": True})
        if status != 200:
            return 0, []
        rows = [row for row in answer["explain"]["ranks"] if row["filtered"] is None]
        least = min(row["cost"] for row in rows)
        best = [[row["worker_id"], row["dp_rank"]] for row in rows if row["cost"] == least]
        return answer["explain"]["tied_ranks"], best

    def tied(self, body: dict[str, object]) -> list[list[int]]:
        """The ranks that are equally good for a select, as ours says; none if one is best."""
        several, best = self._tied(body)
        return best if several > 1 else []

    def _unnamed(self, step: Step) -> None:
        """Each service draws an id, and is told to free its own."""
        ids, answers = [], []
        for service in self.services:
            status, text = self.raw(service, "POST", "/select_and_reserve", step["body"])
            answer = json.loads(text)
            ids.append(answer.pop("selection_id", None) or answer.pop("reservation_id", None))
            for action in answer.get("kv_hint", {}).get("actions", []):
                action.pop("message_id", None)
            answer.get("kv_hint", {}).pop("message_id", None)
            answers.append((status, replay.canonical(json.dumps(answer))))
        self.compared += 1
        if answers[0] != answers[1]:
            self._differ(step, *answers)
        for service, drawn in zip(self.services, ids, strict=True):
            if drawn is not None:
                self.raw(service, "DELETE", f"/reservations/{drawn}", None)

    def _settle(self, step: Step) -> None:
        """Registrations are answered before they have effect there; here they have (D10)."""
        ranks = [self._ranks(self.services[1])]

        def is_settled() -> bool:
            ranks[1:] = [self._ranks(self.services[0])]
            return ranks[0] == ranks[1]

        if not self._until(is_settled):
            self._differ(step, ranks[1], ranks[0])

    def _ranks(self, service: ChildService) -> list[tuple[int, int]]:
        _, text = self.raw(service, "GET", "/loads", None)
        return sorted(
            (row["worker_id"], row["dp_rank"])
            for entry in json.loads(text)
            for row in entry["loads"]
        )

    def _publish(self, step: Step) -> None:
        """`blocks` of the tokens are then held on the worker's rank 0, in both."""
        publisher = self._engines[step["engine"]]
        if step["event"] == "stored":
            publisher.publish_stored(None, step["tokens"], None, step["hashes"])
        elif step["event"] == "removed":
            publisher.publish_removed(block_hashes=step["hashes"])
        else:
            publisher.publish_all_cleared()
        held: list[int] = []

        def are_held() -> bool:
            held[:] = [self._held(each, step) for each in self.services]
            return held == [step["blocks"]] * 2

        self.compared += 1
        if not self._until(are_held):
            self._differ(step, *held)

    def _hear(self, step: Step) -> None:
        """A worker that came back is listened to: what is published until then is lost."""
        probe = {"engine": step["engine"], "tokens": step["tokens"]}

        def is_heard() -> bool:
            self._heard += 1
            name = [10**9 + self._heard]
            self._engines[step["engine"]].publish_stored(None, step["tokens"], None, name)
            return all(self._held(each, probe) == 1 for each in self.services)

        if not self._until(is_heard):
            self._differ(step, *(self._held(each, probe) for each in self.services))

    def _held(self, service: ChildService, step: Step) -> int:
        _, text = self.raw(service, "POST", "/overlap_scores", {"token_ids": step["tokens"]})
        rows = json.loads(text).get("workers", [])
        found = [row["device_blocks"] for row in rows if row["worker_id"] == step["engine"]]
        return max(found, default=0)

    def _until(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


@contextlib.contextmanager
def running(command: Sequence[str], env: Mapping[str, str], *flags: str) -> Iterator[ChildService]:
    """A service that answers, in an environment that says nothing of it but `env`."""
    port = free_port()
    arguments = [*command, "--port", str(port), *flags]
    environment = plain_environment(DYN_LOG="error", **env)
    with ChildService(arguments, port, env=environment, keep_alive=True) as child:
        yield child


@contextlib.contextmanager
def side_by_side(
    theirs: Sequence[str],
    ours: Sequence[str],
    env: Mapping[str, str],
    *flags: str,
    engines: Iterable[int] = (),
    amend: Amend = as_it_is,
) -> Iterator[SideBySide]:
    """Both, freshly started; `theirs` and `ours` are the commands."""
    with running(theirs, env, *flags) as reference, running(ours, env, *flags) as own:
        pair = SideBySide((reference, own), engines, amend)
        try:
            yield pair
        finally:
            pair.close()


def play(
    seed: int,
    opened: Callable[[], contextlib.AbstractContextManager[SideBySide]],
    run: Callable[[SideBySide], None],
) -> int:
    """How many answers were compared. Fails where one differed, with the steps that led there."""
    with opened() as pair:
        try:
            run(pair)
        except Different as difference:
            steps = "\n".join(json.dumps(step) for step in pair.log)
            raise AssertionError(f"seed {seed}: {difference}\nsteps until then:\n{steps}") from None
        return pair.compared
