"""What a call costs, counted instead of timed: the lines of Python that it runs.

A loop costs a line or more each time round, on every machine alike. Loops inside C functions count
once: where one may hide, a test watches what is looped over.
"""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[..., object], *arguments: object) -> int:
    """The lines that a call executes, in all the functions that it enters.

    The collector, which may have callbacks of its own (hypothesis has), is not among them.
    """
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call(*arguments)
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return lines
