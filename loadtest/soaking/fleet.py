"""Who runs in a soak: the measured selector, its peers, engines, clients that behave, the watch.

Every process has fixed ports, so that one that was killed comes back as itself.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtest.child_service import (
    JSON,
    ChildService,
    free_port,
    plain_environment,
    start,
)
from loadtest.soaking.answers import BLOCK_SIZE, MODEL

START_S = 60.0
TOTAL_BLOCKS = 4_000  # of a worker, as it is registered: shedding begins at a part of it
SHED_ABOVE = 0.85


class SoakError(Exception):
    """The soak cannot go on. A readable line."""


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
        """Raises SoakError once it has ended by itself."""
        code = self.process.poll()
        if code:
            words = self._errors.read_text(errors="replace").strip()[-500:]
            raise SoakError(f"{' '.join(self._words)} ended with {code}: {words}")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Service:
    """A selector or slot tracker at fixed ports, with the measured one's peers among its flags."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        env: Mapping[str, str],
        cpus: Collection[int],
    ) -> None:
        self.port = port
        self._command, self._env, self._cpus = command, env, cpus
        self.start()

    def start(self) -> None:
        """Raises SoakError when it does not answer in time."""
        self.child = ChildService(
            self._command,
            self.port,
            env=plain_environment(**self._env),
            cpus=self._cpus,
            keep_alive=True,
        )
        deadline = time.monotonic() + START_S
        while not self.child.is_healthy():
            self.check()
            if time.monotonic() > deadline:
                raise SoakError(f"{' '.join(self._command[:4])}: no /health in {START_S:.0f} s")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        return self.child.process.pid

    def check(self) -> None:
        """Raises SoakError once it has ended."""
        code = self.child.process.poll()
        if code is not None:
            raise SoakError(f"{self._command[3]} ended with {code}: {self.child.log()[-2_000:]}")

    def kill(self) -> None:
        self.child.stop()

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The answer to a call that must succeed, parsed. Raises SoakError, OSError."""
        data = None if body is None else msgspec.json.encode(body)
        status, answer = self.child.request(method, path, data, JSON)
        if not 200 <= status < 300:
            raise SoakError(f"{method} {path}: {status} {answer[:300]!r}")
        return msgspec.json.decode(answer) if answer else None

    def metrics(self) -> str:
        status, answer = self.child.request("GET", "/metrics")
        if status != 200:
            raise SoakError(f"/metrics: {status}")
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
        raise SoakError("the measured process has no memory: it ended")


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

    def __enter__(self) -> "Fleet":
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
        self._stack.callback(service.kill)
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
        """Raises SoakError when one has ended that nobody killed."""
        self.measured.check()
        for program in self.programs:
            program.check()


def stop(pid: int, *, go_on: bool = False) -> None:
    """SIGSTOP, or SIGCONT."""
    os.kill(pid, signal.SIGCONT if go_on else signal.SIGSTOP)


def ended_in_order(process: subprocess.Popen[bytes], patience_s: float) -> int:
    """Exit status after SIGTERM. Raises SoakError when it takes longer."""
    process.terminate()
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        raise SoakError(f"process {process.args!r} did not end in {patience_s:.0f} s") from None
