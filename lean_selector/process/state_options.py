"""How a service can be told to keep its state. What keeps it is imported only then."""

from collections.abc import Mapping

from lean_selector.process.options import Option, number, path

STATE_OPTIONS = (
    Option(
        "--state-dir",
        path,
        None,
        "keep workers, thresholds, peers and live reservations in this directory, and start from "
        "there",
        metavar="DIR",
    ),
    Option(
        "--state-interval-secs",
        number(0.05, 3600.0),
        1.0,
        "how often live reservations are written there, when something changed",
    ),
)


def state_of(values: Mapping[str, object]) -> dict[str, object] | None:
    """What StateConfig is made of; None: nothing is kept."""
    if values["state_dir"] is None:
        return None
    return {"path": values["state_dir"], "interval_s": values["state_interval_secs"]}
