"""What `lean-selector gateway` can be told: its own options, and beside them the selector's."""

import argparse
from collections.abc import Mapping

import msgspec

from lean_selector.outbound.url import Url, base_without_version
from lean_selector.process.endpoint_options import check_given
from lean_selector.process.options import Option, integer, number, or_none, resolve
from lean_selector.process.prompt_options import prompt_options, prompt_settings_of
from lean_selector.process.selector_config import SELECTOR_OPTIONS, SelectorConfig, selector_config
from lean_selector.process.service_options import (
    POSITIVE_SECONDS,
    Listen,
    listen_of,
    port_option,
)
from lean_selector.prompts.settings import Mode, PromptSettings

_MEGABYTE = 1 << 20
_API_PORT = 8092  # the selector's API, as of lean-selector itself
# For workers that say nothing of blocks, as those that publish no events.
_DEFAULTS = '{"block_size": 16}'
_TOUCHES = 3.0  # in the life of a reservation


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `lean-selector gateway` was told."""

    listen: Listen
    workers: list[str]  # base URLs
    selector: SelectorConfig  # in this process; `listen` is where its API is
    prompts: PromptSettings
    silence_s: float
    most_body_bytes: int

    @property
    def touch_after_s(self) -> float:
        """So often a reservation is touched while its answer goes on."""
        return self.selector.router.reservation_expiry_s / _TOUCHES


def worker_url(value: str) -> str:
    """`http://host:port` of a worker, of whom nothing else is used; /v1 may be behind it, as in
    what OpenAI's clients are told. Raises ValueError."""
    url = Url(value)
    if base_without_version(url.target) or "?" in value or "#" in value:
        raise ValueError(
            f"`{value}`: expected http://HOST:PORT, perhaps with /v1: workers are asked at the root"
        )
    return url.origin


_OWN_OPTIONS = (
    port_option(8080),
    Option(
        "--drain-secs",
        number(0.0),
        30.0,
        "how long a stop may take: answers that have begun go on for so long",
    ),
    Option(
        "--selector-port",
        integer(0, 65535),
        _API_PORT,
        "HTTP port of the selector's own API, and of the metrics; 0 takes a free one",
    ),
    *prompt_options(Mode.LEARN, Mode.LEARN, Mode.TOKENIZE, Mode.LOCAL, Mode.OFF),
    Option(
        "--worker-silence-secs",
        POSITIVE_SECONDS,
        600.0,
        "a worker that says nothing for so long has failed its request",
    ),
    Option(
        "--worker-health-interval-secs",
        or_none(number(0.01)),
        5.0,
        "ask every worker this often how it is, over HTTP; `none`: never",
    ),
    Option("--max-body-mb", integer(1, 4096), 64, "largest body of a request, in MiB"),
)
_OWN = {option.flag for option in _OWN_OPTIONS}
GATEWAY_OPTIONS = (
    *_OWN_OPTIONS,
    *(option for option in SELECTOR_OPTIONS if option.flag not in _OWN),
)


def gateway_config(
    parser: argparse.ArgumentParser, args: argparse.Namespace, environ: Mapping[str, str]
) -> GatewayConfig:
    """The configuration of `lean-selector gateway`. `args.workers` are base URLs."""
    values = resolve(parser, GATEWAY_OPTIONS, args, environ)
    try:
        workers = list(dict.fromkeys(map(worker_url, args.workers)))
    except ValueError as error:
        parser.error(str(error))
    check_given(parser, values, "", workers)
    if not workers and args.discover is None:
        parser.error("name the workers: lean-selector gateway http://HOST:PORT ...")
    prompts = prompt_settings_of(parser, values)
    assert prompts is not None
    megabytes = values["max_body_mb"]
    assert isinstance(megabytes, int)
    return GatewayConfig(
        listen=msgspec.convert(listen_of(parser, values), Listen),
        workers=workers,
        selector=_selector(parser, args, environ, values, workers),
        prompts=msgspec.convert(prompts, PromptSettings),
        silence_s=msgspec.convert(values["worker_silence_secs"], float),
        most_body_bytes=megabytes * _MEGABYTE,
    )


def _selector(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    environ: Mapping[str, str],
    values: Mapping[str, object],
    workers: list[str],
) -> SelectorConfig:
    """Of the selector in this process: as it would be told on its own command line."""
    own = argparse.Namespace(**vars(args))
    for option in _OWN_OPTIONS:
        setattr(own, option.name, None)
    own.port = str(values["selector_port"])
    own.uds = None
    interval = values["worker_health_interval_secs"]
    own.worker_health_interval_secs = None if interval is None else str(interval)
    if workers:
        own.discover = [*(args.discover or ()), *(f"url:{url}" for url in workers)]
        if args.discover_defaults is None:
            own.discover_defaults = _DEFAULTS
    config = selector_config(parser, own, environ)
    router = msgspec.structs.replace(config.router, needs_kv_events=False)
    return msgspec.structs.replace(config, router=router)
