"""A process that has no descriptor left for anything new."""

import contextlib
import resource
from collections.abc import Iterator

_FEW = 8  # the ones below are taken in every process of tests, and a poll of so many is allowed


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """What is open stays so; whatever would open more fails with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FEW, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
