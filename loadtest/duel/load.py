"""Drives one service with a list of whole requests: with wrk under closed load, or our client.

Owns the files in which the requests travel to the program that sends them, and the reading of its
result. Both programs send every request once, in order; neither shares a process with the engines.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from lean_selector.demo.player import percentile
from loadtest.duel.targets import dies_with_us

CONNECTIONS = 32  # enough to keep either service busy; fewer than prompts.PREFILL_LAG
OPEN_CONNECTIONS = 64  # at 1 000 requests a second: none waits for one unless all of 64 ms are slow
_LIMIT_S = 120  # of one run; each is made for about a second

# wrk ends by the clock, not by a count. This script hands every request out once, in order, and
# lets a connection sleep when there is none left for it: when all of them sleep, all requests are
# answered, and the script stops wrk. Its very first call is wrk's own look at a request.
_WRK_SCRIPT = """
local ffi = require("ffi")
ffi.cdef[[int getpid(void); int kill(int, int);]]
local requests, looked, at, given, asleep = {}, false, 0, 0, 0
init = function(args)
  local file = assert(io.open(args[1], "rb"))
  for length in io.lines(args[2]) do requests[#requests + 1] = file:read(tonumber(length)) end
end
delay = function()
  if given < #requests then given = given + 1 return 0 end
  asleep = asleep + 1
  if asleep == CONNECTIONS then wrk.thread:stop() ffi.C.kill(ffi.C.getpid(), 2) end
  return 3600000
end
request = function()
  if not looked then looked = true return requests[1] end
  at = at + 1
  return requests[at]
end
done = function(summary, latency)
  local e = summary.errors
  local form = '\\nRESULT {"requests":%d,"seconds":%f,"p50_us":%d,"p99_us":%d,"bad":%d}\\n'
  io.write(string.format(form, summary.requests, summary.duration / 1e6,
    latency:percentile(50), latency:percentile(99),
    e.status + e.connect + e.read + e.write + e.timeout))
end
"""


class Load(msgspec.Struct):
    """What a run came to. latencies_us and late_us only under open load."""

    requests: int
    seconds: float
    bad: int
    p50_us: float = 0.0
    p99_us: float = 0.0
    latencies_us: list[int] = []
    late_us: list[int] = []


_decode = msgspec.json.Decoder(Load).decode


class LoadFailed(Exception):
    """The program that sends the requests did not come to an end. A readable line."""


class RequestFile:
    """Requests in a file, as the senders read them; gone when the context ends."""

    def __init__(self, requests: Sequence[bytes]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="versus-")
        folder = Path(self._directory.name)
        self.count = len(requests)
        self.requests, self.lengths = folder / "requests", folder / "lengths"
        self.script = folder / "replay.lua"
        self.requests.write_bytes(b"".join(requests))
        self.lengths.write_text("".join(f"{len(request)}\n" for request in requests))
        self.script.write_text(_WRK_SCRIPT.replace("CONNECTIONS", str(CONNECTIONS)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._directory.cleanup()


def closed_load(port: int, file: RequestFile, cpus: Collection[int] = ()) -> Load:
    """Send all requests over CONNECTIONS connections, as fast as they are answered."""
    wrk = shutil.which("wrk")
    if wrk is None:
        return _client(port, file, ["--connections", str(CONNECTIONS)], cpus)
    command = [wrk, "-t1", f"-c{CONNECTIONS}", f"-d{_LIMIT_S}s", "-s", str(file.script)]
    command += [f"http://127.0.0.1:{port}/", "--", str(file.requests), str(file.lengths)]
    output = _run(command, cpus)
    result = output.partition("\nRESULT ")[2].partition("\n")[0]
    if not result:
        raise LoadFailed(f"wrk says: {output[-300:]}")
    load = _decode(result)
    if load.requests != file.count:
        raise LoadFailed(f"wrk had {load.requests} answers to {file.count} requests")
    return load


def open_load(port: int, file: RequestFile, rate: float, count: int | None = None) -> Load:
    """Send requests at a fixed rate per second, from the first again if count says so."""
    flags = ["--connections", str(OPEN_CONNECTIONS), "--rate", str(rate)]
    if count is not None:
        flags += ["--count", str(count)]
    return _client(port, file, flags, ())


def _client(port: int, file: RequestFile, flags: list[str], cpus: Collection[int]) -> Load:
    program = str(Path(__file__).with_name("client.py"))
    command = [sys.executable, program, str(port), str(file.requests), str(file.lengths), *flags]
    load = _decode(_run(command, cpus))
    ordered = sorted(load.latencies_us)
    load.p50_us, load.p99_us = percentile(ordered, 0.5), percentile(ordered, 0.99)
    return load


def _run(command: list[str], cpus: Collection[int]) -> str:
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=dies_with_us(cpus),
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise LoadFailed(f"{command[0]}: not done in {_LIMIT_S} s") from error
        finally:
            with suppress(ProcessLookupError):
                process.kill()
    if process.returncode:
        raise LoadFailed(f"{command[0]}: {(errors or output)[-300:].strip()}")
    return output
