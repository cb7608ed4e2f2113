"""`lean-selector check URL`: the command line of the check, and its exit status."""

import argparse
import asyncio
import shutil
import sys
from collections.abc import Sequence

import uvloop
import zmq.asyncio

from lean_selector.curve.keys import CurveClient
from lean_selector.doctor.engine_keys import SECRET, SERVERS, client_keys
from lean_selector.doctor.examination import Examination, as_json
from lean_selector.doctor.findings import Finding, Level
from lean_selector.doctor.replay import Replays
from lean_selector.doctor.selector_questions import NotASelector, Selector
from lean_selector.doctor.table import table
from lean_selector.outbound.client import OutboundClient
from lean_selector.outbound.credentials import Credentials
from lean_selector.outbound.token_file import TokenFile
from lean_selector.outbound.trust import Trust
from lean_selector.outbound.url import Url
from lean_selector.sockets.links import Links
from lean_selector.sockets.resolver import Resolver

DEFAULT_URL = "http://127.0.0.1:8092"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the check."""
    parser.add_argument(
        "url", nargs="?", type=_url, default=DEFAULT_URL, help=f"of the selector; {DEFAULT_URL}"
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="send each engine one tiny completion, and see whether its KV events come",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=5.0, help="patience with each answer; default: 5"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.add_argument("--worker-token-file", help="a bearer token for the engines")
    parser.add_argument("--ca-file", help="PEM certificates to trust, in place of the system's")
    parser.add_argument("--token-file", help="a bearer token for the selector")
    parser.add_argument("--cert-file", help="our PEM certificate, for a selector that asks for one")
    parser.add_argument("--key-file", help="the key of that certificate")
    parser.add_argument(
        SERVERS, metavar="PATH", help="public keys of engines that encrypt, as the selector has it"
    )
    parser.add_argument(
        SECRET, metavar="PATH", help="key pair that engines admit, as the selector has it"
    )


def _url(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    try:
        Url(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return url


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError("must be above 0 and at most an hour")
    return value


def main(argv: Sequence[str]) -> int:
    """0 without errors (warnings are none), 1 with errors, 2 when there is nobody to ask."""
    parser = argparse.ArgumentParser(
        prog="lean-selector check",
        description="Ask a running selector and its engines, and tell what mends what is wrong.",
        epilog="Exit status: 0 without errors, 1 with errors, 2 if there is no selector to ask.",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.key_file is not None and args.cert_file is None:
        parser.error("--key-file requires --cert-file")
    try:
        engines = Credentials(_token(args.worker_token_file), Trust(args.ca_file))
        ours = Trust(args.ca_file, args.cert_file, args.key_file)
        selector = Credentials(_token(args.token_file), ours)
        ours.context()
        keys = client_keys(
            args.kv_events_curve_server_keys_file, args.kv_events_curve_secret_key_file
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            findings = runner.run(_check(args, selector, engines, keys))
    except NotASelector as error:
        sys.stderr.write(f"lean-selector check: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    if args.json:
        sys.stdout.write(as_json(findings).decode() + "\n")
    else:
        width = shutil.get_terminal_size((120, 24)).columns
        sys.stdout.write("".join(f"{line}\n" for line in table(findings, width)))
    return int(any(finding.level is Level.ERROR for finding in findings))


def _token(path: str | None) -> TokenFile | None:
    return None if path is None else TokenFile(path)


async def _check(
    args: argparse.Namespace, ours: Credentials, engines: Credentials, keys: CurveClient | None
) -> list[Finding]:
    resolver = Resolver()
    resolve = resolver.resolve
    selector = Selector(
        OutboundClient(resolve, token=ours.token, trust=ours.trust), args.url, args.seconds
    )
    asked = OutboundClient(resolve, token=engines.token, trust=engines.trust)
    context = zmq.asyncio.Context()
    try:
        replays = Replays(Links(context, resolver, engine_keys=keys))
        patience_s, may_probe = args.seconds, args.probe
        return await Examination(selector, asked, replays, resolve, patience_s, may_probe).run()
    finally:
        context.destroy(linger=0)
