"""What the operating system says a process has used: CPU time, memory, threads, descriptors.

Linux only. Knows nothing of services. Everything is read from outside, so a program written in any
language is measured in the same way.
"""

import os
import time
from pathlib import Path

import msgspec

# clockid of another process's CPU time, as glibc's clock_getcpuclockid() makes it:
# the complement of the pid, and CPUCLOCK_SCHED in the low bits.
_CPUCLOCK_SCHED = 2
_KIB = 1024


class Footprint(msgspec.Struct, frozen=True):
    """Memory in bytes. pss counts a page shared by n processes as 1/n of it."""

    rss: int
    pss: int
    threads: int
    descriptors: int


def cpu_ns(pid: int) -> int:
    """User and system time of all threads of a process, those that ended included.

    In nanoseconds where the kernel has a CPU clock per process, else in steps of a clock tick.
    Raises FileNotFoundError when there is no such process.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # utime and stime, 14 and 15 of proc(5)
        return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def footprint(pid: int) -> Footprint:
    """Memory, threads and open descriptors of a process now. Raises OSError when it is gone."""
    proc = Path(f"/proc/{pid}")
    sizes = {
        name: int(value.split()[0]) * _KIB
        for name, _, value in (
            line.partition(":") for line in (proc / "smaps_rollup").read_text().splitlines()[1:]
        )
    }
    return Footprint(
        sizes["Rss"],
        sizes["Pss"],
        sum(1 for _ in (proc / "task").iterdir()),
        sum(1 for _ in (proc / "fd").iterdir()),
    )


def machine() -> str:
    """One line that names the processor, how many of it may be used, and the system."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(models, os.uname().machine)
    uname = os.uname()
    return f"{model}, {len(os.sched_getaffinity(0))} CPUs, {uname.sysname} {uname.release}"
