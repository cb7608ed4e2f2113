"""Who runs in a soak: the measured selector, its peers, engines, clients that behave, the watch.

Every process has fixed ports, so that one that was killed comes back as itself.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from lean_selector.tools.service_process import ServiceError
from lean_selector.tools.simulated_engines import EngineSpeed, SimulatedEngine, make_request
from loadtest.child_service import ChildService, free_port, plain_environment, start
from loadtest.http_client import http

ENGINES = 4
PROMPTS_PER_S = 20.0  # of each engine
EXPIRY_S = 20.0  # of reservations
TOTAL_BLOCKS = 4_000  # of a worker, as it is registered: shedding begins at a part of it
SHED_ABOVE = 0.85
TOKEN = "soak"  # of everybody who may ask
authorized = functools.partial(http, token=TOKEN)


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


# -- processes -------------------------------------------------------------------------------------


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

    def end(self, patience_s: float) -> None:
        """With SIGTERM. Raises ServiceError when it takes longer."""
        self.process.terminate()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired as error:
            raise ServiceError(str(error)) from None

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

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        with_token = {"authorization": f"Bearer {TOKEN}", **(headers or {})}
        return super().request(method, path, body, with_token)


class Engine(Program):
    """One worker of the fleet."""

    def __init__(self, number: int, seed: int, folder: Path, cpus: Collection[int]) -> None:
        self.worker_id = number
        self._events, self._replay = free_port(), free_port()
        words = [number, self._events, self._replay, seed]
        super().__init__(["loadtest.soaking.fleet", *map(str, words)], folder, cpus)

    def registration(self, host: str) -> dict[str, object]:
        """`host`: by which name the selector is to reach it."""
        return {
            "worker_id": self.worker_id,
            "model_name": MODEL,
            "endpoint": f"http://127.0.0.1:{9_000 + self.worker_id}",  # named, never contacted
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": 8_192,
            "total_kv_blocks": TOTAL_BLOCKS,
            "kv_events_endpoints": {"0": f"tcp://{host}:{self._events}"},
            "replay_endpoint": f"tcp://{host}:{self._replay}",
        }


CAPACITY_BLOCKS = 4_096
# An empty cache fills faster than it changes later, so that memory is soon what it stays.
FILLING_PROMPTS = 2_000
FILLING_FASTER = 4


async def serve(worker_id: int, events: int, replay: int, seed: int) -> None:
    """An engine of the soak, a process: a bounded cache that tells every change of it.

    It serves the soak's prompts to itself, PROMPTS_PER_S of them, and publishes real KV events,
    with a replay socket. It never answers HTTP: a selector only names it. Until it is killed.
    """
    engine = SimulatedEngine(
        worker_id,
        CAPACITY_BLOCKS,
        BLOCK_SIZE,
        EngineSpeed(),
        None,
        endpoint=f"tcp://127.0.0.1:{events}",
        replay_endpoint=f"tcp://127.0.0.1:{replay}",
    )
    drawn, prompts = Random(), families(seed)
    for served in itertools.count():
        prompt = drawn.choice(drawn.choice(prompts))
        output = [drawn.choice(FRESH_TOKENS) for _ in range(BLOCK_SIZE)]
        request = make_request("soak", prompt + output, len(prompt), 1, BLOCK_SIZE)
        running = await engine.prefill(request)
        await engine.decode(running, 0)
        engine.finish(running)
        faster = FILLING_FASTER if served < FILLING_PROMPTS else 1
        await asyncio.sleep(drawn.expovariate(PROMPTS_PER_S * faster))


# -- the measured process in our hands: a library that is preloaded there --------------------------
# A time namespace cannot shift the wall clock, and setting the machine's would shift everyone's.
# The library is compiled where there is a C compiler; without one, why not is said.

_LAYOUT = struct.Struct("=5q")  # of `struct told` in shim.c
_COMPILER_S = 120.0
LIBRARY = "soak_shim.so"


def preloaded(folder: Path) -> "Preload | str":
    """The library, compiled into `folder`, or why it cannot be."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler for the library that steps its clock"
    command = [compiler, "-O2", "-fPIC", "-shared", "-o", str(folder / LIBRARY)]
    command += [str(Path(__file__).with_name("shim.c")), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_S)
    if done.returncode:
        return f"the library that steps its clock: {done.stderr.strip()[-200:]}"
    return Preload(folder)


class Preload:
    """The library, and what it is told. `environment` is what the process needs to have it."""

    def __init__(self, folder: Path) -> None:
        told = folder / "told"
        told.write_bytes(bytes(_LAYOUT.size))
        with told.open("r+b") as file:
            self._told = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.environment = {"LD_PRELOAD": str(folder / LIBRARY), "SOAK_TOLD": str(told)}

    def step_clock(self, seconds: int) -> None:
        """From now on its wall clock is that much ahead of the machine's; below 0: behind."""
        struct.pack_into("=q", self._told, 0, seconds * 1_000_000_000)

    def hang_names(self, hang: bool) -> None:
        """Whether names under `.soak` find nobody who answers; else they are this host's."""
        struct.pack_into("=q", self._told, 8, int(hang))

    def ask_for_memory(self) -> None:
        """Its C library is to hand back what it keeps for later, as soon as it looks at a clock."""
        struct.pack_into("=q", self._told, 24, self.asked + 1)

    @property
    def asked(self) -> int:
        return int(_LAYOUT.unpack_from(self._told)[3])

    @property
    def handed(self) -> int:
        """The last time that it was asked, and has."""
        return int(_LAYOUT.unpack_from(self._told)[4])

    @property
    def hung(self) -> int:
        """How many look-ups have met that."""
        return int(_LAYOUT.unpack_from(self._told)[2])


# -- all of them -----------------------------------------------------------------------------------


class Fleet:
    """All processes of a run."""

    def __init__(
        self,
        args: argparse.Namespace,
        folder: Path,
        preload: Mapping[str, str],
        stack: contextlib.ExitStack,
    ) -> None:
        """`folder` takes what all write. `preload` is the measured process' environment. All end
        with the `stack`."""
        self.folder = folder
        self._args = args
        cpus = sorted(os.sched_getaffinity(0))
        self.measured_cpus = cpus[-1:] if args.pin else []
        self.other_cpus = cpus[:-1] if args.pin else []
        self.sync_ports = [free_port() for _ in range(3)]
        self.ports = [free_port() for _ in range(3)]
        self.rogue_peer = free_port()
        self.uds = str(folder / "selector.sock")
        (folder / "tokens").write_text(f"admin {TOKEN}\n")
        (folder / "token").write_text(TOKEN)
        self._preload = preload
        self.names_hosts = bool(preload)  # the measured process knows hosts under `.soak`
        self._stack = stack
        self.engines = list[Engine]()
        self.programs = list[Program]()
        host = "engines.soak" if self._preload else "127.0.0.1"
        for number in range(1, ENGINES + 1):
            engine = Engine(number, args.seed, self.folder, self.other_cpus)
            self._stack.callback(engine.kill)
            self.engines.append(engine)
        self.measured = self._service("lean_selector", 0)
        self.second = self._service("lean_selector", 1)
        self.tracker = self._service("lean_selector.slot_tracker", 2)
        for engine in self.engines:
            self.measured.call("POST", "/workers", engine.registration(host))
        self.register_with_second()
        self.register_with_tracker()

    def _service(self, module: str, at: int) -> Service:
        args = self._args
        others = [other for other in range(3) if other != at]
        peers = [f"tcp://127.0.0.1:{self.sync_ports[other]}" for other in others]
        urls = [f"http://127.0.0.1:{self.ports[other]}" for other in others]
        # -P: the folder of the checkout is no place to find a compiled form's modules in.
        command = [args.python, "-P", "-m", module, "--host", "127.0.0.1"]
        command += ["--port", str(self.ports[at]), "--log-level", "error"]
        command += ["--reservation-expiry-secs", str(EXPIRY_S)]
        command += ["--replica-sync-port", str(self.sync_ports[at])]
        command += ["--auth-token-file", f"{self.folder}/tokens"]
        command += ["--peer-token-file", f"{self.folder}/token"]
        if module == "lean_selector":
            command += ["--active-decode-blocks-threshold", str(SHED_ABOVE)]
        if at == 0:
            peers.append(f"tcp://127.0.0.1:{self.rogue_peer}")
            command += ["--uds", self.uds, "--prompts", "tokenize"]
            if self._preload:
                command += ["--discover", "dns:discovered.soak:9"]
            command += ["--state-dir", f"{self.folder}/state"]
        command += ["--replica-sync-peers", ",".join(peers)]
        command += ["--replica-sync-catch-up", ",".join(urls)]
        env = self._preload if at == 0 else {}
        cpus = self.measured_cpus if at == 0 else self.other_cpus
        service = Service(command, self.ports[at], env, cpus)
        self._stack.callback(service.stop)
        return service

    def register_with_second(self) -> None:
        """Also after it was killed: its catalog is in memory."""
        for engine in self.engines:  # the name is known in the measured process alone
            self.second.call("POST", "/workers", engine.registration("127.0.0.1"))

    def register_with_tracker(self) -> None:
        for engine in self.engines:
            body = {"model_name": MODEL, "tenant_id": "default", "block_size": BLOCK_SIZE}
            body |= {"worker_id": engine.worker_id, "dp_start": 0, "dp_size": 1}
            self.tracker.call("POST", "/register", body)

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


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    asyncio.run(serve(*map(int, sys.argv[1:])))
