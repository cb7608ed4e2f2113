"""What a selector's discoveries look for and do not find, or cannot register. Asks nobody."""

from collections.abc import Iterator
from typing import Final

from lean_selector.doctor.findings import Finding, Level
from lean_selector.doctor.selector_shapes import DiscoveredWorker, Discoveries, Discovery

_SUBJECT: Final = "discovery"
_FINDS_WORKERS: Final = "workers"
# By what a discovery begins with.
_MENDS: Final = {
    "file": "put a list of workers there, for the selector to read",
    "dns": "check the name in DNS, as the selector asks it",
    "kubernetes": "check the service, and that the selector's account may watch its EndpointSlices",
}


def looks_for_workers(found: Discoveries | None) -> bool:
    """Whether it was told to find workers by itself."""
    return found is not None and any(
        discovery.finds == _FINDS_WORKERS for discovery in found.discoveries
    )


def judge_discoveries(found: Discoveries) -> Iterator[Finding]:
    """What keeps a discovery from finding, then who was found and is not registered."""
    for discovery in found.discoveries:
        yield from _judge_discovery(discovery)
    for worker in found.workers:
        yield from _judge_worker(worker)
    for peer in found.peers:
        if peer.last_error is not None:
            what = f"peer {peer.endpoint} is {peer.state}: {peer.last_error}"
            yield Finding(Level.WARNING, _SUBJECT, what)


def _judge_discovery(discovery: Discovery) -> Iterator[Finding]:
    name = discovery.discovery
    if discovery.state == "failing":
        mend = _MENDS.get(name.partition(":")[0])
        what = f"{name} fails: {discovery.last_error}"
        if discovery.found is None:
            yield Finding(Level.ERROR, _SUBJECT, what, mend)
        else:
            holds = f"{what}; the {discovery.found} {discovery.finds} that it found before hold"
            yield Finding(Level.WARNING, _SUBJECT, holds, mend)
    elif discovery.found is None:
        yield Finding(Level.NOTE, _SUBJECT, f"{name} has found nothing yet")
    elif not discovery.found:
        yield Finding(Level.NOTE, _SUBJECT, f"{name} finds no {discovery.finds}")


def _judge_worker(worker: DiscoveredWorker) -> Iterator[Finding]:
    subject = f"worker {worker.worker_id}"
    by = ", ".join(worker.discoveries) or "nobody any more"
    who = f"found at {worker.endpoint} by {by}"
    why = worker.last_error
    if worker.state == "asking" and why is None:
        yield Finding(Level.NOTE, subject, f"{who}: it is being asked what it is")
    elif worker.state == "asking":
        yield Finding(
            Level.ERROR,
            subject,
            f"{who}, not registered: it does not tell what it is: {why}",
            "start the engine, or correct where it is looked for; it is asked again by itself",
        )
    elif worker.state == "refused":
        yield Finding(
            Level.ERROR,
            subject,
            f"{who}, not registered: {why}",
            "correct its entry, --discover-defaults or --allow-endpoint, as that says",
        )
    elif worker.state == "removed":
        yield Finding(Level.NOTE, subject, f"{who}, deleted over HTTP: away until it is found anew")
    elif worker.state == "registered" and why is not None:
        yield Finding(Level.WARNING, subject, f"{who}: what it was registered as holds: {why}")
