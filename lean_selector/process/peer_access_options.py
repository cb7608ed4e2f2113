"""How other services of ours are asked: replicas and index peers."""

import argparse
from collections.abc import Mapping

from lean_selector.process.options import Option, path, text

PEER_ACCESS_OPTIONS = (
    Option(
        "--peer-token-file",
        path,
        None,
        "bearer token for every request that we make of another replica or an index peer; "
        "read again when it changes",
        metavar="PATH",
    ),
    Option(
        "--peer-ca-file",
        path,
        None,
        "certificate authorities (PEM) of those with https URLs; unset: the system's",
        metavar="PATH",
    ),
    Option(
        "--peer-cert-file",
        path,
        None,
        "our certificate (PEM) for those that ask for one; read again when it changes",
        metavar="PATH",
    ),
    Option("--peer-key-file", path, None, "the key of that certificate (PEM)", metavar="PATH"),
    Option(
        "--peer-tls-name",
        text,
        None,
        "the name that their certificates must have; unset: the host of the URL",
        metavar="NAME",
    ),
)


def peer_access_of(
    parser: argparse.ArgumentParser, values: Mapping[str, object]
) -> dict[str, object]:
    return {**access_of(parser, values, "peer"), "tls_name": values["peer_tls_name"] or None}


def access_of(
    parser: argparse.ArgumentParser, values: Mapping[str, object], whose: str
) -> dict[str, object]:
    """The files of --WHOSE-token-file and its kin."""
    files = {
        kind: values[f"{whose}_{kind}"]
        for kind in ("token_file", "ca_file", "cert_file", "key_file")
    }
    for given, missing in (("cert", "key"), ("key", "cert")):
        if files[f"{given}_file"] is not None and files[f"{missing}_file"] is None:
            parser.error(f"--{whose}-{given}-file requires --{whose}-{missing}-file")
    return files
