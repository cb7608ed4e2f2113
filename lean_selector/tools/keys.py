"""`lean-selector keys`: creates a key pair for CURVE, the encryption of ZeroMQ."""

import argparse
import os
import sys
from collections.abc import Sequence

from lean_selector.links.curve_keys import KeyPair, check_curve, new_pair

_PUBLIC = """\
#   ZeroMQ CURVE **Public** Certificate, made by `lean-selector keys`
#   Copy it to the machines that admit or trust the owner of the secret key.

metadata
curve
    public-key = "{public}"
"""
_SECRET = """\
#   ZeroMQ CURVE **Secret** Certificate, made by `lean-selector keys`
#   DO NOT PROVIDE THIS FILE TO OTHERS.

metadata
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        help=(
            "path without extension: NAME.key will be the public file, NAME.key_secret the secret "
            "one"
        ),
    )


def main(argv: Sequence[str]) -> int:
    """Writes the two key files with mode 0600, and prints the public key. Return 0. After an
    error, writes neither file and returns 1."""
    parser = argparse.ArgumentParser(
        prog="lean-selector keys",
        description=(
            "Creates a key pair for CURVE, the encryption of ZeroMQ, for "
            "--replica-sync-curve-secret-key-file. Existing files are kept."
        ),
    )
    add_arguments(parser)
    name = parser.parse_args(argv).name
    if not os.path.basename(name):
        parser.error(f"NAME `{name}` has no file name: expected FOLDER/NAME, without .key")
    try:
        check_curve("keys")
        pair = new_pair()
        write_pair(name, pair)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        where = getattr(error, "filename", None) or name
        sys.stderr.write(f"{parser.prog}: error: {where}: {reason or error}\n")
        return 1
    sys.stdout.write(pair.public.decode() + "\n")
    return 0


def write_pair(name: str, pair: KeyPair) -> None:
    """Writes NAME.key and NAME.key_secret, or neither. Raises OSError if either file exists."""
    public, secret = pair.public.decode(), pair.secret.decode()
    written: list[str] = []
    try:
        for path, text in (
            (f"{name}.key_secret", _SECRET.format(public=public, secret=secret)),
            (f"{name}.key", _PUBLIC.format(public=public)),
        ):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            written.append(path)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
    except BaseException:
        for path in written:
            os.unlink(path)
        raise
