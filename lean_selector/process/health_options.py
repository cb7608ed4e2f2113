"""How the selector can be told to eject workers that fail, and to poll them.

Rows of the table of options, and what is made of them. The model is envoy's outlier detection.
"""

from collections.abc import Mapping

from lean_selector.core.settings import EjectionSettings
from lean_selector.process.options import Option, integer, number
from lean_selector.process.service_options import POSITIVE_SECONDS

_DEFAULTS = EjectionSettings()


def path(text: str) -> str:
    if not text.startswith("/") or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("expected a path that begins with / and has neither spaces nor controls")
    return text


HEALTH_OPTIONS = (
    Option(
        "--worker-ejection-failures",
        integer(0, 2**31),
        _DEFAULTS.failures,
        "a rank is given no work for a while after so many requests in a row are reported failed "
        "or refused; 0: never",
    ),
    Option(
        "--worker-ejection-secs",
        number(0.001),
        _DEFAULTS.base_s,
        "for so long the first time, the nth time in a row n times as long",
    ),
    Option(
        "--worker-ejection-max-secs",
        number(0.001),
        _DEFAULTS.longest_s,
        "but no longer than this",
    ),
    Option(
        "--worker-ejection-max-percent",
        number(0.0, 100.0),
        _DEFAULTS.most_percent,
        "of a model's ranks no more than this are ejected; those of one worker always may be",
    ),
    Option(
        "--worker-health-interval-secs",
        number(0.01),
        None,
        "ask every worker this often how it is, over HTTP; unset: never",
    ),
    Option(
        "--worker-health-path",
        path,
        "/health",
        "what is asked for, at the worker's endpoint; any 2xx is well",
        metavar="PATH",
    ),
    Option(
        "--worker-health-timeout-secs",
        POSITIVE_SECONDS,
        2.0,
        "longest that its answer may take",
    ),
    Option(
        "--worker-health-failures",
        integer(1, 2**31),
        _DEFAULTS.failed_polls,
        "a worker is given no work after so many of these in a row failed, until one succeeds",
    ),
)


def ejection_of(values: Mapping[str, object]) -> dict[str, object]:
    """What EjectionSettings are made of."""
    return {
        "failures": values["worker_ejection_failures"],
        "base_s": values["worker_ejection_secs"],
        "longest_s": values["worker_ejection_max_secs"],
        "failed_polls": values["worker_health_failures"],
        "most_percent": values["worker_ejection_max_percent"],
    }


def polls_of(values: Mapping[str, object]) -> dict[str, object] | None:
    """What PollSettings are made of; None: workers are not polled."""
    if values["worker_health_interval_secs"] is None:
        return None
    return {
        "interval_s": values["worker_health_interval_secs"],
        "path": values["worker_health_path"],
        "timeout_s": values["worker_health_timeout_secs"],
    }
