"""`lean-selector check URL`: queries a selector, its engines and their event ports, and prints
findings.

It changes nothing, except that `--probe` adds a prompt to the cache of each engine."""

import argparse
import asyncio
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from lean_selector.http.outbound import OutboundClient, OutboundFailed, Resolve
from lean_selector.http.trust import Credentials, TokenFile, Trust
from lean_selector.http.urls import Url, base_without_version
from lean_selector.links.links import Links
from lean_selector.links.names import Resolver
from lean_selector.tools.check_probes import Asked, Probes
from lean_selector.tools.check_questions import (
    BEYOND_ALL,
    AskedSelector,
    NoReplay,
    NotASelector,
    Replays,
    judge_engine,
    judge_port,
    judge_ports,
)
from lean_selector.tools.service_process import within
from lean_selector.wire.findings import CheckedWorker, Finding, SelectorFacts
from lean_selector.wire.selection_bodies import KvSource

# -- the order of questions ------------------------------------------------------------------------

MOST_AT_ONCE: Final = 16  # engines queried at a time


@dataclass(eq=False)
class Examination:
    """The check of one selector. `patience_s`: how many seconds to wait for each answer, and for
    the KV events that follow a completion."""

    selector: AskedSelector
    engines: OutboundClient
    replays: Replays
    resolve: Resolve
    patience_s: float
    may_probe: bool

    def __post_init__(self) -> None:
        self._turn = asyncio.Semaphore(MOST_AT_ONCE)
        self._checked_ports: set[tuple[str, str]] = set()  # a port of two ranks is tried once
        self._deaf_ports: set[str] = set()
        self.endpoints: dict[str, str | None] = {}  # subject -> endpoint, once it ran

    async def run(self) -> list[Finding]:
        """Runs the check, and returns its findings. Raises NotASelector."""
        facts = await self.selector.facts()
        probed: list[Finding] = []
        if self.may_probe:
            probed = await self._probe(facts)
            facts = await self.selector.facts()  # a source that was silent may have published since
        sources = facts.sources or []
        asked = [self._ask(worker, sources) for worker in facts.workers if worker.endpoint]
        knocked = [self._check_ports(source) for source in sources]
        lists = [*await asyncio.gather(*asked), *await asyncio.gather(*knocked), probed]
        facts.deaf_ports = self._deaf_ports
        self.endpoints = {f"worker {each.worker_id}": each.endpoint for each in facts.workers}
        return [*judge_selector(facts), *(finding for found in lists for finding in found)]

    async def _ask(self, worker: CheckedWorker, sources: list[KvSource]) -> list[Finding]:
        async with self._turn:
            try:
                base = base_without_version(worker.endpoint or "")
                told = await ask_engine(self.engines, base)
                return [*judge_engine(worker, told), *judge_ports(worker, told, sources)]
            except (OutboundFailed, ValueError) as error:
                what = f"its engine cannot be queried: {error}"
                mend = "check the engine, and its endpoint: http://HOST:PORT as gateways reach it"
                return [Finding(Level.ERROR, f"worker {worker.worker_id}", what, mend)]

    async def _check_ports(self, source: KvSource) -> list[Finding]:
        subject = subject_of(source)

        found: list[Finding] = []

        async def port(field: str, endpoint: str) -> str | None:
            if (field, endpoint) in self._checked_ports:
                return None
            self._checked_ports.add((field, endpoint))
            found.append(await judge_port(self.resolve, subject, field, endpoint, self.patience_s))
            return found[-1].level

        async with self._turn:
            if await port("kv_events_endpoint", source.endpoint) == Level.ERROR:
                self._deaf_ports.add(source.endpoint)
            if source.replay_endpoint is not None:
                if await port("replay_endpoint", source.replay_endpoint) == Level.OK:
                    found.append(await self._ask_replay(subject, source.replay_endpoint))
            elif source.state != NO_REPLAY:  # otherwise the source's state already reports it
                found.append(
                    Finding(
                        Level.WARNING,
                        subject,
                        "no replay endpoint: missed events are lost, including those during a "
                        "restart of the selector",
                        "start the engine with a replay_endpoint in its --kv-events-config",
                    )
                )
        return found

    async def _ask_replay(self, subject: str, endpoint: str) -> Finding:
        level, mend = Level.OK, None
        try:
            await self.replays.stored_since(endpoint, BEYOND_ALL, self.patience_s)
            what = "answers"
        except NoReplay as error:
            level, what = Level.ERROR, f"no replay in {self.patience_s:g} s: {error}"
            mend = (
                "register the engine's replay_endpoint (vLLM: one port per rank), not its endpoint"
            )
        return Finding(level, subject, f"replay_endpoint {endpoint}: {what}", mend)

    async def _probe(self, facts: SelectorFacts) -> list[Finding]:
        asked = Asked(self.selector, self.engines, self.replays, self._turn, self.patience_s)
        return await Probes(asked, facts).run()


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
    asked = OutboundClient(resolve, engines)
    context = zmq.asyncio.Context()
    try:
        replays = Replays(Links(context, resolver))
        patience_s, may_probe = args.seconds, args.probe
        examined = Examination(selector, asked, replays, resolve, patience_s, may_probe)
        return await examined.run(), examined.endpoints
    finally:
        context.destroy(linger=0)
