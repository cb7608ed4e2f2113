"""Nothing that a running service keeps holds a credential: all objects of its process are looked
through, after requests that brought some."""

import http.client
import os
import sys
from contextlib import closing
from pathlib import Path

import pytest

from loadtest.child_service import ChildService, free_port, plain_environment
from tests.support.running_service import DEADLINE_S, wait_until

# Runs the service. Words that come through the pipe are looked for in all of its objects.
PROGRAM = """
import gc, os, sys, threading

from lean_selector.cli import main

pipe, answer = sys.argv[1:3]


def look():
    with open(pipe, "rb") as file:
        text = file.read()
    words = text.split()
    own = {id(each) for each in (text, words, *words)}
    gc.collect()
    gc.unfreeze()
    due, seen, found = gc.get_objects(), set(), set()
    while due:
        thing = due.pop()
        if id(thing) in seen or id(thing) in own or thing is due or thing is seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, (bytes, bytearray, str)):
            held = thing.encode(errors="replace") if isinstance(thing, str) else bytes(thing)
            found.update(word for word in words if word in held)
        else:
            due += gc.get_referents(thing)
    with open(answer + ".new", "wb") as file:
        file.write(b" ".join(found))
    os.rename(answer + ".new", answer)


threading.Thread(target=look, daemon=True).start()
sys.exit(main(sys.argv[3:]))
"""
KNOWN, UNKNOWN, BASIC = "known-t0ken-4711", "unknown-t0ken-0815", "YmFzaWM6c2VjcmV0"
MARK = "a-line-that-is-remembered"  # so that it is known that the search gets that far


@pytest.mark.parametrize("asks", [True, False], ids=["tokens asked for", "none asked for"])
def test_no_object_of_the_process_holds_a_credential(tmp_path: Path, asks: bool) -> None:
    pipe, answer, tokens = tmp_path / "pipe", tmp_path / "answer", tmp_path / "tokens"
    os.mkfifo(pipe)
    tokens.write_text(f"write {KNOWN}\n")
    flags = ("--auth-token-file", str(tokens)) if asks else ()
    port = free_port()
    command = [sys.executable, "-c", PROGRAM, str(pipe), str(answer), "--port", str(port)]
    service = ChildService(
        [*command, "--use-kv-events", "false", "--access-log", *flags],
        port,
        env=plain_environment(),
    )
    try:
        service.wait()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        with closing(connection):
            for credential in (f"Bearer {KNOWN}", f"Bearer {UNKNOWN}", f"Basic {BASIC}") * 3:
                for path in ("/workers", "/nothing"):
                    headers = {"Authorization": credential, "X-Mark": MARK}
                    connection.request("GET", path, headers=headers)
                    connection.getresponse().read()
                for length in (2, 200):  # varies its section
                    body = b'{"token_ids":[%b1]}' % (b"1," * length)
                    connection.request("POST", "/select", body, headers)
                    connection.getresponse().read()
            # The connection lives on, and what it remembers.
            pipe.write_text(f"{KNOWN} {UNKNOWN} {BASIC} {MARK}")
            wait_until(answer.exists, "its objects are looked through")
        assert answer.read_text().split() == [MARK]
    finally:
        service.stop()
    for word in (KNOWN, UNKNOWN, BASIC):
        assert word not in service.log()
