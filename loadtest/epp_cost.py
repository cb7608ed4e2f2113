"""What a request and a streamed chunk cost in an endpoint picker behind Envoy, and what it adds.

    python -m loadtest.epp_cost [--compiled PYTHON] [--other COMMAND]

CPU seconds of the selector's process, as in `gateway_cost`, whose workers and clients are used; the
time to the first byte, one request after the other; and the memory that 1 000 open streams take.
The ways to ask take turns: nobody, ext_authz (`deploy/envoy/envoy.yaml`), and ext_proc in the modes
of MODES (`deploy/envoy/epp.yaml`). `--other` starts another picker, with a selector's routing: it
takes POST /workers at {api}, and ext_proc at {picker}.
"""

import argparse
import asyncio
import contextlib
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from loadtest.child_service import (
    ROOT,
    ChildService,
    free_port,
    plain_environment,
)
from loadtest.gateway_cost import (
    FEW,
    MANY,
    cpu_us,
    load,
    open_streams_mb,
    print_table,
    request_for,
    running,
    running_worker,
)

DEPLOY = ROOT / "deploy/envoy"
DUPLEX = {
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
}
NOTHING = {
    "request_header_mode": "SKIP",
    "request_body_mode": "NONE",
    "response_header_mode": "SKIP",
    "response_trailer_mode": "SKIP",
}
MODES = {"full duplex": DUPLEX, "trailers": {"response_header_mode": "SKIP"}}
LUA = "trailers and Lua"
COLUMNS = ("us a request", "us a chunk", "ms to the first byte", "MB for 1 000 streams")
FLAGS = ("--host", "127.0.0.1", "--use-kv-events", "false", "--prompts", "off")
Place = tuple[int, int]  # the ports of the API and of the picker


def _ours(python: str, place: Place) -> list[str]:
    api, port = map(str, place)
    command = [python, "-P", "-m", "lean_selector", "--port", api, *FLAGS]
    return [*command, "--epp-port", port, "--epp-host", "127.0.0.1"]


def _asked_by_http(python: str, folder: str, ends: int, place: Place) -> list[str]:
    command = [python, "-P", "-m", "lean_selector", "--port", str(place[0]), *FLAGS]
    lifecycle = f"syslog:127.0.0.1:{ends}"
    return [*command, "--uds", f"{folder}/selector.sock", "--lifecycle-from", lifecycle]


def _other(command: str, place: Place) -> list[str]:
    return shlex.split(command.format(api=place[0], picker=place[1]))


def _configured(recipe: str, changes: dict[str, str], mode: dict[str, str], folder: str) -> Path:
    text = (DEPLOY / recipe).read_text()
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    for name, value in mode.items():
        text, count = re.subn(rf"(?m)^( +{name}): \w+$", rf"\1: {value}", text)
        assert count == 1, name
    path = Path(folder) / "envoy.yaml"
    path.write_text(text)
    return path


async def _first_byte_ms(port: int, count: int) -> float:
    request, taken = request_for(FEW), []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        began = time.perf_counter()
        writer.write(request)
        await reader.readuntil(b"\n\n")
        taken.append(1e3 * (time.perf_counter() - began))
        await reader.readuntil(b"\n\r\n0\r\n\r\n")
    writer.close()
    return statistics.median(taken)


def _measured(port: int, pid: int, requests: int) -> list[float]:
    """Of COLUMNS."""
    asyncio.run(load(port, request_for(FEW), 200))
    few = cpu_us(port, pid, request_for(FEW), requests)
    many = cpu_us(port, pid, request_for(MANY), requests // 16)
    first_byte = asyncio.run(_first_byte_ms(port, 200))
    taken = asyncio.run(open_streams_mb(port, pid))
    return [few, (many - few) / (MANY - FEW), first_byte, taken]


@contextlib.contextmanager
def _selector(command: list[str], api: int, workers: list[int]) -> Iterator[int]:
    """The process of a selector that knows the workers."""
    with ChildService(command, api, env=plain_environment()) as child:
        for number, worker in enumerate(workers):
            spec = {"worker_id": number, "model_name": "m", "block_size": 16}
            spec |= {"endpoint": f"http://127.0.0.1:{worker}", "total_kv_blocks": 100_000}
            child.call("POST", "/workers", spec)
        yield child.process.pid


def _round(options: argparse.Namespace, workers: list[int], folder: str) -> Iterator[tuple]:  # type: ignore[type-arg]
    """(name, figures) of each candidate."""
    envoy = next(Path(sys.prefix).glob("lib/python*/site-packages/envoy/_bin/envoy"))
    ends = free_port()
    forms = {"pure": sys.executable}
    if options.compiled:
        forms["compiled"] = options.compiled
    candidates = {}
    for form, python in forms.items():
        if form == "pure":
            candidates["nobody asked"] = (partial(_ours, python), "epp.yaml", NOTHING)
        asks = partial(_asked_by_http, python, folder, ends)
        candidates[f"ext_authz, {form}"] = (asks, "envoy.yaml", {})
        for name, mode in (*MODES.items(), (LUA, MODES["trailers"])):
            candidates[f"ext_proc, {name}, {form}"] = (partial(_ours, python), "epp.yaml", mode)
    for name, mode in MODES.items() if options.other else ():
        candidates[f"another, {name}"] = (partial(_other, options.other), "epp.yaml", mode)
    for name, (command, recipe, mode) in candidates.items():
        if options.only and not re.search(options.only, name):
            continue
        port, place = free_port(), (free_port(), free_port())
        listen = "address: {}, port_value: {}"
        changes = {
            listen.format("10.0.0.11", 8000): listen.format("127.0.0.1", workers[0]),
            listen.format("10.0.0.12", 8000): listen.format("127.0.0.1", workers[1]),
            listen.format("0.0.0.0", 8080): listen.format("127.0.0.1", port),
        }
        if recipe == "epp.yaml":
            changes["port_value: 9002"] = f"port_value: {place[1]}"
            if LUA in name:
                changes |= {"#+": "", "port_value: 8092": f"port_value: {place[0]}"}
        else:
            changes["/run/lean/selector.sock"] = f"{folder}/selector.sock"
        config = _configured(recipe, changes, mode, folder)
        flags = "--disable-hot-restart --concurrency 1 --log-level error"
        logger = f"logger --udp --server 127.0.0.1 --port {ends} --rfc3164 --tag envoy"
        line = f"exec {envoy} -c {config} {flags} --file-flush-interval-msec 50"
        shell = ["bash", "-c", line if recipe == "epp.yaml" else f"{line} > >({logger})"]
        with _selector(command(place), place[0], workers) as pid, running(shell, port):
            yield name, _measured(port, pid, options.requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiled", help="a Python that has our compiled wheel")
    parser.add_argument("--other", help="another picker's command, with {api} and {picker}")
    parser.add_argument("--only", help="a regular expression of the candidates' names")
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, list[list[float]]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        workers = [stack.enter_context(running_worker()) for _ in range(2)]
        for _ in range(options.rounds):
            for name, row in _round(options, workers, folder):
                figures.setdefault(name, []).append(row)
                sys.stderr.write(f"{name}: {' '.join(f'{each:.1f}' for each in row)}\n")
    print_table(COLUMNS, figures)


if __name__ == "__main__":
    main()
