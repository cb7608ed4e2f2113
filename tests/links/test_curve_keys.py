"""Files of keys, what of them is refused and never cited, and a socket that asks for keys."""

import logging
from pathlib import Path

import pytest
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from lean_selector.links.curve_keys import BadKeys, CurveGate, give_keys, read_list, read_pair
from tests.support.key_files import KeyFiles, new_pair

PAIR = new_pair()
ANY_PORT = "tcp://127.0.0.1:*"
DEADLINE_MS = 20_000
# Those of known secrets: a key that begins with `#` would be a comment as soon as it is cut.
KEYS = [zmq.curve_public(z85.encode(bytes([number]) * 32)) for number in range(1, 4)]


def test_a_pair_of_pyzmq_is_read(tmp_path: Path) -> None:
    public, secret = zmq.auth.create_certificates(tmp_path, "theirs")
    pair = read_pair(str(secret))
    assert (pair.public, pair.secret) == zmq.auth.load_certificate(secret)
    assert read_list(str(public)) == (pair.public,)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "secret-key"),
        (b'curve\n    public-key = "%b"\n' % PAIR.public, "secret-key"),
        (b'    secret-key = "short"\n', "40 characters"),
        (b"\xff\xfe", "text"),
    ],
    ids=["empty", "no secret", "short", "no text"],  # the key differs in each run
)
def test_what_is_no_pair_is_refused(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "pair"
    path.write_bytes(content)
    with pytest.raises(BadKeys, match=fault):
        read_pair(str(path))


def test_a_list_has_keys_with_words_behind_them_comments_and_certificates(tmp_path: Path) -> None:
    about = b'metadata\n    name = "b"\n    made-at = 8 o clock\n'
    certificate = b'%bcurve\n    public-key = "%b"\n' % (about, KEYS[1])
    text = b"# of all\n\n%b selector-a\n%b\n#%b\n%b\n" % (KEYS[0], certificate, KEYS[2], KEYS[0])
    (tmp_path / "it").write_bytes(text)
    assert read_list(str(tmp_path / "it")) == (KEYS[0], KEYS[1])


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"# nothing\n", "it has no public key"),
        (b"\xff\xfe", "it is not a text file"),
        (b"%b\n%b\n" % (KEYS[0], KEYS[1][:-1]), "it line 2 "),
        (b"%b\n  %b\n" % (KEYS[0], KEYS[1][:-1]), "it line 2 "),
        (b'curve\n    public-key = "%b"\n' % KEYS[0][:-1], "it line 2 "),
        (b"%b\ncurve\n    public-key = %b\n" % (KEYS[0], KEYS[1]), "it line 3 "),
        (b"%b\n" % (b"~" * 40), "it line 1 "),
        (b"%b\n" % (b"$" * 40), "it line 1 "),
        (b'    secret-key = "%b"\n' % PAIR.secret, "it line 1 is a secret key"),
        (b"\n".join(new_pair().public for _ in range(65)), "it holds 65 keys, more than 64"),
    ],
    ids=lambda given: None if isinstance(given, str) else "list",  # keys are new in each process
)
def test_what_is_no_list_is_refused_by_its_line_and_never_cited(
    tmp_path: Path, content: bytes, fault: str
) -> None:
    (tmp_path / "it").write_bytes(content)
    with pytest.raises(BadKeys, match=fault) as told:
        read_list(str(tmp_path / "it"))
    assert PAIR.secret.decode() not in str(told.value)


# -- a socket that asks for keys tells of those it refuses -----------------------------------------


def test_one_who_is_refused_is_told_of_by_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = KeyFiles(tmp_path, "server", "client", "stranger")
    with zmq.Context() as context, caplog.at_level(logging.WARNING, "lean_selector.curve"):
        admitted = (keys.pairs["client"].public,)
        gate = CurveGate(ThreadAuthenticator(context), keys.pairs["server"], admitted)
        gate.start()
        server = context.socket(zmq.PUB)
        gate.guard(server)
        server.bind(ANY_PORT)
        stranger = context.socket(zmq.SUB)
        monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        give_keys(stranger, keys.pairs["stranger"], keys.pairs["server"].public)
        stranger.connect(server.get_string(zmq.LAST_ENDPOINT))
        assert monitor.poll(DEADLINE_MS)
        stranger.disable_monitor()
        monitor.close(0)
        stranger.close(0)
        server.close(0)
        gate.close()
    told = [record.getMessage() for record in caplog.records]
    words = f"a client's public key is not admitted: {keys.public('stranger')}"
    assert set(told) == {words}
    assert gate.refused >= 1
