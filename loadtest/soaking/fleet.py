"""Who runs in a soak: the measured selector, its peers, engines, clients that behave, the watch.

Every process has fixed ports, so that one that was killed comes back as itself.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Self

import msgspec

from lean_selector.tools.service_process import ServiceError
from loadtest.child_service import ChildService, free_port, plain_environment, start

TOTAL_BLOCKS = 4_000  # of a worker, as it is registered: shedding begins at a part of it
SHED_ABOVE = 0.85


# -- prompts: families that share a beginning, the same in every process ---------------------------

BLOCK_SIZE = 16  # tokens
MODEL = "soak"
FAMILIES = 64
OF_A_FAMILY = 16
SHARED_BLOCKS = 4
OWN_BLOCKS = (1, 5)
FIRST_TOKENS = range(100_000)
# Tokens that make a prompt another than all before it; always seven digits, so that a request's
# bytes can be prepared but for them.
FRESH_TOKENS = range(1_000_000, 10_000_000)


def families(seed: int) -> list[list[list[int]]]:
    """FAMILIES lists of OF_A_FAMILY prompts, as tokens: SHARED_BLOCKS alike, then their own."""
    drawn = Random(f"soak/{seed}")

    def tokens(blocks: int) -> list[int]:
        return drawn.choices(FIRST_TOKENS, k=blocks * BLOCK_SIZE)

    found = list[list[list[int]]]()
    for _ in range(FAMILIES):
        shared = tokens(SHARED_BLOCKS)
        found.append([shared + tokens(drawn.randint(*OWN_BLOCKS)) for _ in range(OF_A_FAMILY)])
    return found


# -- processes ------------------------------------------------------------------------------------


class Program:
    """A process of ours beside the measured one, started again with the same words."""

    def __init__(self, words: Sequence[str], folder: Path, cpus: Collection[int]) -> None:
        self._words, self._cpus = words, cpus
        self.output = folder / f"{words[0].rpartition('.')[2]}-{words[1]}.out"
        self._errors = self.output.with_suffix(".err")
        self.start()

    def start(self) -> None:
        with self.output.open("ab") as output, self._errors.open("ab") as errors:
            command = [sys.executable, "-m", *self._words]
            self.process = start(command, self._cpus, output=output, errors=errors)

    def check(self) -> None:
        """Raises ServiceError once it has ended by itself."""
        code = self.process.poll()
        if code:
            words = self._errors.read_text(errors="replace").strip()[-500:]
            raise ServiceError(f"{' '.join(self._words)} ended with {code}: {words}")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Service(ChildService):
    """A selector or slot tracker at fixed ports, with the measured one's peers among its flags."""

    def __init__(
        self, command: Sequence[str], port: int, env: Mapping[str, str], cpus: Collection[int]
    ) -> None:
        self._command, self._env, self._cpus = command, plain_environment(**env), cpus
        self.port = port
        self.start()

    def start(self) -> None:
        """Once more after it was killed. Raises ServiceError when it does not answer in time."""
        super().__init__(self._command, self.port, env=self._env, cpus=self._cpus, keep_alive=True)
        self.wait()

    @property
    def pid(self) -> int:
        return self.process.pid

    def metrics(self) -> str:
        status, answer = self.request("GET", "/metrics")
        if status != 200:
            raise ServiceError(f"/metrics: {status}")
        return answer.decode()

    def metric(self, name: str) -> float:
        """The sum over a metric's series."""
        rows = [row for row in self.metrics().splitlines() if row.startswith(name)]
        return sum(float(row.rpartition(" ")[2]) for row in rows if row[len(name)] in "{ ")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def rss_mb(self) -> float:
        for row in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if row.startswith("VmRSS"):
                return int(row.split()[1]) / 1024
        raise ServiceError("the measured process has no memory: it ended")


class Engine(Program):
    """One worker of the fleet. `host`: the name by which the selector is to reach it."""

    def __init__(
        self, number: int, host: str, rate: float, seed: int, folder: Path, cpus: Collection[int]
    ) -> None:
        self.worker_id = number
        self._host, self._events, self._replay = host, free_port(), free_port()
        words = ["loadtest.soaking.engine", str(number), str(self._events), str(self._replay)]
        super().__init__([*words, "--rate", str(rate), "--seed", str(seed)], folder, cpus)

    def registration(self) -> dict[str, object]:
        return {
            "worker_id": self.worker_id,
            "model_name": MODEL,
            "endpoint": f"http://127.0.0.1:{9_000 + self.worker_id}",  # named, never contacted
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": 8_192,
            "total_kv_blocks": TOTAL_BLOCKS,
            "kv_events_endpoints": {"0": f"tcp://{self._host}:{self._events}"},
            "replay_endpoint": f"tcp://{self._host}:{self._replay}",
        }


# -- all of them ----------------------------------------------------------------------------------


class Fleet:
    """All processes of a run; gone when the context ends."""

    def __init__(
        self, args: argparse.Namespace, state: Path, folder: Path, preload: Mapping[str, str]
    ) -> None:
        """`state`: where the measured process keeps it. `folder` takes what all write. `preload` is
        the measured process' environment."""
        self.folder = folder
        self._args, self._state = args, state
        cpus = sorted(os.sched_getaffinity(0))
        self.measured_cpus = cpus[-1:] if args.pin else []
        self.other_cpus = cpus[:-1] if args.pin else []
        self.sync_ports = [free_port() for _ in range(3)]
        self.ports = [free_port() for _ in range(3)]
        self.rogue_peer = free_port()
        self.uds = str(folder / "selector.sock")
        self._preload = preload
        self.names_hosts = bool(preload)  # the measured process knows hosts under `.soak`
        self._stack = contextlib.ExitStack()
        self.engines = list[Engine]()
        self.programs = list[Program]()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        args = self._args
        host = "engines.soak" if self._preload else "127.0.0.1"
        for number in range(1, args.engines + 1):
            own = (number, host, args.engine_rate, args.seed)
            engine = Engine(*own, self.folder, self.other_cpus)
            self._stack.callback(engine.kill)
            self.engines.append(engine)
        self.measured = self._service("lean_selector", 0)
        self.second = self._service("lean_selector", 1)
        self.tracker = self._service("lean_selector.slot_tracker", 2)
        for engine in self.engines:
            self.measured.call("POST", "/workers", engine.registration())
        self.register_with_second()
        self.register_with_tracker()

    def _service(self, module: str, at: int) -> Service:
        args = self._args
        peers = [
            f"tcp://127.0.0.1:{port}" for port in self.sync_ports if port != self.sync_ports[at]
        ]
        urls = [f"http://127.0.0.1:{port}" for port in self.ports if port != self.ports[at]]
        # -P: the folder of the checkout is no place to find a compiled form's modules in.
        command = [args.python, "-P", "-m", module, "--host", "127.0.0.1"]
        command += ["--port", str(self.ports[at]), "--log-level", "error"]
        command += ["--reservation-expiry-secs", str(args.expiry)]
        command += ["--replica-sync-port", str(self.sync_ports[at])]
        if module == "lean_selector":
            command += ["--active-decode-blocks-threshold", str(SHED_ABOVE)]
        if at == 0:
            peers.append(f"tcp://127.0.0.1:{self.rogue_peer}")
            command += ["--uds", self.uds, "--kv-source-grace-secs", "5"]
            if self._preload:
                command += ["--discover", "dns:discovered.soak:9"]
            command += ["--state-dir", str(self._state)]
        command += ["--replica-sync-peers", ",".join(peers)]
        command += ["--replica-sync-catch-up", ",".join(urls)]
        env = self._preload if at == 0 else {}
        cpus = self.measured_cpus if at == 0 else self.other_cpus
        service = Service(command, self.ports[at], env, cpus)
        self._stack.callback(service.stop)
        return service

    def register_with_second(self) -> None:
        """Also after it was killed: its catalog is in memory."""
        for engine in self.engines:
            body = engine.registration()
            if self._preload:  # the name is known in the measured process alone
                body = msgspec.json.decode(
                    msgspec.json.encode(body).replace(b"engines.soak", b"127.0.0.1")
                )
            self.second.call("POST", "/workers", body)

    def register_with_tracker(self) -> None:
        for engine in self.engines:
            where = {"model_name": MODEL, "tenant_id": "default", "block_size": BLOCK_SIZE}
            self.tracker.call(
                "POST",
                "/register",
                {**where, "worker_id": engine.worker_id, "dp_start": 0, "dp_size": 1},
            )

    def program(self, *words: str, beside_measured: bool = False) -> Program:
        """Start one of the programs of this folder, on the CPU of the measured process or not."""
        cpus = self.measured_cpus if beside_measured else self.other_cpus
        program = Program([f"loadtest.soaking.{words[0]}", *words[1:]], self.folder, cpus)
        self._stack.callback(program.kill)
        self.programs.append(program)
        return program

    def check(self) -> None:
        """Raises ServiceError when one has ended that nobody killed."""
        self.measured.check()
        for program in self.programs:
            program.check()


def stop(pid: int, *, go_on: bool = False) -> None:
    """SIGSTOP, or SIGCONT."""
    os.kill(pid, signal.SIGCONT if go_on else signal.SIGSTOP)


def ended_in_order(process: subprocess.Popen[bytes], patience_s: float) -> int:
    """Exit status after SIGTERM. Raises ServiceError when it takes longer."""
    process.terminate()
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        raise ServiceError(f"process {process.args!r} did not end in {patience_s:.0f} s") from None
