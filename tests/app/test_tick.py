"""A tick that fails: once, and for good. A service of its own process, asked over HTTP."""

import http.client
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SERVICE = """
import asyncio, dataclasses, sys
from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits
from lean_selector.http.protocol import HttpProtocol
from lean_selector.http.response import encode_response
from lean_selector.app import host
from lean_selector.parts import Part
from lean_selector.app.service_flags import ListenFlags, TrackerConfig
from lean_selector.tasks import failures

host.TICK_S = 0.001
fails_until = int(sys.argv[1])
ticks = 0

class Ticking(Part):
    def tick(self, now):
        global ticks
        ticks += 1
        if ticks <= fails_until:
            raise RuntimeError("a bug of the tick")

    def refuse_new(self):
        print("refuses", flush=True)

    async def close(self):
        print("closed", flush=True)

def app(request):
    return encode_response(200, str(failures["tick"]).encode() + (b" ticks" if ticks > 30 else b""))

async def serve(config, log_state):
    connections = Connections(asyncio.get_running_loop().call_soon, Limits(), max_connections=10)
    server = host.HttpServer(lambda: HttpProtocol(app, connections), connections, listen)
    await server.start()
    print(server._listeners[0]._socket.getsockname()[1], flush=True)
    await server.serve(Ticking())

listen = ListenFlags(host="127.0.0.1", port=0, drain_s=0.2, max_connections=10)
fields = [one for one in dataclasses.fields(TrackerConfig) if one.name not in ("given", "listen")]
config = TrackerConfig(listen=listen, **{one.name: one.type() for one in fields})
host.run(config, serve)
"""


@contextmanager
def service(fails_until: int) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(fails_until)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_tick_that_fails_is_counted_and_the_next_ones_come() -> None:
    with service(fails_until=3) as process:
        port = first_line(process)
        client = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
        said = b""
        while not said.endswith(b" ticks"):
            client.request("GET", "/")
            said = client.getresponse().read()
        client.close()
        assert said == b"3 ticks"
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "refuses\nclosed\n")
    assert f" port={port} " in log.partition(" listening ")[2].partition("\n")[0] + " "
    assert log.count("task failed: tick; the next one is due") == 3
    assert "a bug of the tick" in log


def test_a_tick_that_fails_for_good_stops_the_service_in_order_and_with_an_error() -> None:
    with service(fails_until=1_000_000) as process:
        out, log = process.communicate(timeout=60)
    assert (process.returncode, out.splitlines()[1:]) == (1, ["refuses", "closed"])
    assert log.count("task failed: tick; the next one is due") == 19
    assert log.count("task failed: tick; the service stops") == 1
    assert log.endswith("RuntimeError: a bug of the tick\n")
