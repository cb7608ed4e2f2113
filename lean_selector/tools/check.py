"""`lean-selector check URL`: queries a selector, its engines and their event ports, and prints
findings.

It changes nothing, except that `--probe` adds a prompt to the cache of each engine."""

import argparse
import asyncio
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import uvloop
import zmq.asyncio

from lean_selector.api.judgements import (
    NO_REPLAY,
    Level,
    judge_selector,
    subject_of,
)
from lean_selector.app.flags import refuse_dropped
from lean_selector.discovery.engine_questions import ask_engine
from lean_selector.http.outbound import OutboundClient, OutboundFailed
from lean_selector.http.trust import Credentials, TokenFile, Trust
from lean_selector.http.urls import Url, base_without_version
from lean_selector.links.links import Links
from lean_selector.links.names import Resolver
from lean_selector.tools.check_probes import Probes
from lean_selector.tools.check_questions import (
    BEYOND_ALL,
    Asked,
    AskedSelector,
    NoReplay,
    NotASelector,
    judge_engine,
    judge_port,
    judge_ports,
    stored_since,
)
from lean_selector.tools.service_process import within
from lean_selector.wire.findings import CheckedWorker, Finding
from lean_selector.wire.selection_bodies import KvSource

# -- the order of questions ------------------------------------------------------------------------

MOST_AT_ONCE: Final = 16  # engines queried at a time


async def examine(asked: Asked, may_probe: bool) -> tuple[list[Finding], dict[str, str | None]]:
    """Runs the check. Return its findings, and the endpoints of workers by subject (`worker 3`).
    Raises NotASelector."""
    facts = await asked.selector.facts()
    probed: list[Finding] = []
    if may_probe:
        probed = await Probes(asked, facts).run()
        facts = await asked.selector.facts()  # a source that was silent may have published since
    sources = facts.sources or []
    ports: dict[tuple[str, str], KvSource] = {}  # a port of two ranks is tried once
    for source in sources:
        ports.setdefault(("kv_events_endpoint", source.endpoint), source)
        if source.replay_endpoint is not None:
            ports.setdefault(("replay_endpoint", source.replay_endpoint), source)
    engines = [_ask(asked, worker, sources) for worker in facts.workers if worker.endpoint]
    knocks = [_knock(asked, source, *port) for port, source in ports.items()]
    told = [*await asyncio.gather(*engines), *(knocked := await asyncio.gather(*knocks))]
    facts.deaf_ports = {
        endpoint
        for (field, endpoint), (first, *_) in zip(ports, knocked, strict=True)
        if field == "kv_events_endpoint" and first.level == Level.ERROR
    }
    endpoints = {f"worker {each.worker_id}": each.endpoint for each in facts.workers}
    found = [finding for each in [*told, probed] for finding in each]
    return [*judge_selector(facts), *found, *_without_replay(sources)], endpoints


async def _ask(asked: Asked, worker: CheckedWorker, sources: list[KvSource]) -> list[Finding]:
    async with asked.turn:
        try:
            told = await ask_engine(asked.engines, base_without_version(worker.endpoint or ""))
            return [*judge_engine(worker, told), *judge_ports(worker, told, sources)]
        except (OutboundFailed, ValueError) as error:
            what = f"its engine cannot be queried: {error}"
            mend = "check the engine, and its endpoint: http://HOST:PORT as gateways reach it"
            return [Finding(Level.ERROR, f"worker {worker.worker_id}", what, mend)]


async def _knock(asked: Asked, source: KvSource, field: str, endpoint: str) -> list[Finding]:
    """Tests a port, and whether a replay endpoint answers."""
    async with asked.turn:
        subject = subject_of(source)
        port = await judge_port(asked, subject, field, endpoint)
        if field != "replay_endpoint" or port.level != Level.OK:
            return [port]
        level, what, mend = Level.OK, "answers", None
        try:
            await stored_since(asked, endpoint, BEYOND_ALL)
        except NoReplay as error:
            level, what = Level.ERROR, f"no replay in {asked.patience_s:g} s: {error}"
            mend = (
                "register the engine's replay_endpoint (vLLM: one port per rank), not its endpoint"
            )
        return [port, Finding(level, subject, f"replay_endpoint {endpoint}: {what}", mend)]


def _without_replay(sources: list[KvSource]) -> Iterator[Finding]:
    what = (
        "no replay endpoint: missed events are lost, including those during a restart of the "
        "selector"
    )
    mend = "start the engine with a replay_endpoint in its --kv-events-config"
    for source in sources:
        # The state NO_REPLAY reports it already.
        if source.replay_endpoint is None and source.state != NO_REPLAY:
            yield Finding(Level.WARNING, subject_of(source), what, mend)


def as_json(findings: Iterable[Finding]) -> bytes:
    """Return a JSON array with one object per finding, for scripts."""
    return msgspec.json.format(msgspec.json.encode(list(findings)), indent=2)


# -- findings as lines for people ------------------------------------------------------------------

_ORDER: Final = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)
_LEAST_WIDTH: Final = 60


def table(
    findings: Sequence[Finding], width: int, endpoints: Mapping[str, str | None]
) -> Iterator[str]:
    """Yields findings as lines of about `width` characters, errors first. Advice follows each
    finding, and the last line has the number of findings per level. What is wrong with a worker
    names its endpoint too; `endpoints` has it by subject."""
    subject_width = max((len(finding.subject) for finding in findings), default=0)
    margin = len(Level.WARNING) + 2 + subject_width + 2
    room = max(width, _LEAST_WIDTH, margin + 30)
    for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.level)):
        head = f"{finding.level:<{len(Level.WARNING)}}  {finding.subject:<{subject_width}}  "
        endpoint = endpoints.get(finding.subject.partition(" rank ")[0])
        if finding.level in (Level.OK, Level.NOTE) or not endpoint or endpoint in finding.what:
            yield from _wrapped(head, finding.what, room)
        else:
            yield from _wrapped(head, f"({endpoint}) {finding.what}", room)
        if finding.mend is not None:
            yield from _wrapped(" " * margin, f"-> {finding.mend}", room)
    counts = {level: sum(finding.level is level for finding in findings) for level in _ORDER}
    words = [f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in _ORDER[:-1]]
    yield ", ".join([*words, f"{counts[Level.OK]} ok"])


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


# -- the command line ------------------------------------------------------------------------------

DEFAULT_URL = "http://127.0.0.1:8092"


def add_selector_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds command-line arguments for the URL of a selector, and for credentials."""
    parser.add_argument(
        "url",
        nargs="?",
        type=selector_url,
        default=DEFAULT_URL,
        help=f"of the selector; {DEFAULT_URL}",
    )
    parser.add_argument("--token-file", help="a bearer token for the selector; `read` is enough")
    parser.add_argument("--ca-file", help="trusted PEM certificates, instead of the system's")
    parser.add_argument("--cert-file", help="our PEM certificate, for a selector that requires one")
    parser.add_argument("--key-file", help="the key of that certificate")


def selector_credentials(args: argparse.Namespace) -> Credentials:
    """Return the access token and certificates that the command line names. Raises OSError or
    ValueError if a file is unusable, and ValueError for --key-file without --cert-file."""
    if args.key_file is not None and args.cert_file is None:
        raise ValueError("--key-file requires --cert-file")
    trust = Trust(args.ca_file, args.cert_file, args.key_file)
    trust.context()
    return Credentials(token_of(args.token_file), trust)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selector_arguments(parser)
    parser.add_argument(
        "--probe",
        action="store_true",
        help="send each engine a short completion, and check whether its KV events arrive",
    )
    parser.add_argument(
        "--seconds", type=patience, default=5.0, help="timeout for each answer; default: 5"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.add_argument("--worker-token-file", help="a bearer token for the engines")


def selector_url(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    try:
        Url(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return url


patience = within(float, 0.001, 3600)


def main(argv: Sequence[str]) -> int:
    """Runs the check. Return 0 if no finding is an error (warnings do not count), 1 if there are
    errors, 2 if no selector answers, and 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="lean-selector check",
        description=(
            "Check a running selector and its engines, and print what is wrong and how to correct "
            "it."
        ),
        epilog="Exit status: 0 without errors, 1 with errors, 2 if no selector answers.",
    )
    add_arguments(parser)
    refuse_dropped(parser, argv)
    args = parser.parse_args(argv)
    try:
        selector = selector_credentials(args)
        engines = Credentials(token_of(args.worker_token_file), Trust(args.ca_file))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            findings, endpoints = runner.run(_check(args, selector, engines))
    except NotASelector as error:
        sys.stderr.write(f"lean-selector check: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    if args.json:
        sys.stdout.write(as_json(findings).decode() + "\n")
    else:
        width = shutil.get_terminal_size((120, 24)).columns
        sys.stdout.write("".join(f"{line}\n" for line in table(findings, width, endpoints)))
    return int(any(finding.level == Level.ERROR for finding in findings))


def token_of(path: str | None) -> TokenFile | None:
    return None if path is None else TokenFile(path)


async def _check(
    args: argparse.Namespace, ours: Credentials, engines: Credentials
) -> tuple[list[Finding], dict[str, str | None]]:
    resolver = Resolver()
    resolve = resolver.resolve
    selector = AskedSelector(OutboundClient(resolve, ours), args.url, args.seconds)
    context = zmq.asyncio.Context()
    try:
        client, links = OutboundClient(resolve, engines), Links(context, resolver)
        turn = asyncio.Semaphore(MOST_AT_ONCE)
        asked = Asked(selector, client, links, resolve, args.seconds, turn)
        return await examine(asked, args.probe)
    finally:
        context.destroy(linger=0)
