"""A selector whose constants are as tests need them: `python -m tests.support.tuned FLAG ...`.

It warns of a source at once, waits an hour for a recovery, and a tenth of a second for a health
check."""

import sys
from functools import partial

from lean_selector.app import selector_parts
from lean_selector.cli import main
from lean_selector.discovery import polls
from lean_selector.events.subscriptions import KvSubscriptions
from lean_selector.replicas import recovery

TUNED = "tests.support.tuned"

if __name__ == "__main__":
    selector_parts.KvSubscriptions = partial(KvSubscriptions, grace_s=0.0)  # type: ignore
    recovery.Recovery = partial(recovery.Recovery, timeout_s=3600.0)  # type: ignore
    polls.WorkerPolls = partial(polls.WorkerPolls, timeout_s=0.1)  # type: ignore
    sys.exit(main())
