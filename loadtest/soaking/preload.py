"""The measured process' wall clock, names and spare memory, in our hands by a library that is
preloaded there.

A time namespace cannot shift the wall clock, and setting the machine's would shift everyone's. The
library is compiled where there is a C compiler; without one, why not is said.
"""

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

_LAYOUT = struct.Struct("=5q")  # of `struct told` in shim.c
_COMPILER_S = 120.0


class Unavailable(Exception):
    """A readable reason."""


class Preload:
    """The library, and what it is told. `environment` is what the process needs to have it."""

    def __init__(self, folder: Path) -> None:
        """Compile it into `folder`. Raises Unavailable."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise Unavailable("no C compiler for the library that steps its clock")
        library, told = folder / "soak_shim.so", folder / "told"
        command = [compiler, "-O2", "-fPIC", "-shared", "-o", str(library)]
        command += [str(Path(__file__).with_name("shim.c")), "-ldl"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILER_S
        )
        if done.returncode:
            raise Unavailable(f"the library that steps its clock: {done.stderr.strip()[-200:]}")
        told.write_bytes(bytes(_LAYOUT.size))
        with told.open("r+b") as file:
            self._told = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.environment = {"LD_PRELOAD": str(library), "SOAK_TOLD": str(told)}

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
