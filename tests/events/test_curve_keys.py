"""Files of keys: what is taken and what is refused and never cited."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
import zmq.auth
from zmq.utils import z85

from lean_selector.events.curve_keys import BadKeys, new_pair, public_keys, read_pair
from lean_selector.tools.keys import main

PAIR = new_pair()
# Those of known secrets: a key that begins with `#` would be a comment as soon as it is cut.
KEYS = [zmq.curve_public(z85.encode(bytes([number]) * 32)) for number in range(1, 4)]


def keys_command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lean_selector", "keys", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_makes_a_pair_that_we_and_pyzmq_read(tmp_path: Path) -> None:
    name = str(tmp_path / "selector")
    made = keys_command(name)
    assert (made.returncode, made.stderr) == (0, "")
    public = made.stdout.strip().encode()
    pair = read_pair(f"{name}.key_secret")
    assert pair.public == public == zmq.curve_public(pair.secret)
    assert public_keys("it", Path(f"{name}.key").read_bytes()) == (public,)
    assert zmq.auth.load_certificate(f"{name}.key_secret") == (public, pair.secret)
    assert zmq.auth.load_certificate(f"{name}.key") == (public, None)
    for path in (f"{name}.key_secret", f"{name}.key"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert pair.secret.decode() not in made.stdout + repr(pair)


@pytest.mark.parametrize("name", ["", "folder/"])
def test_the_command_makes_no_hidden_files_of_a_folders_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main([name])
    assert f"NAME `{name}` " in capsys.readouterr().err
    assert [*tmp_path.rglob("*")] == [tmp_path / "folder"]


@pytest.mark.parametrize("ending", ["key", "key_secret"])
def test_the_command_touches_no_file_that_exists(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / f"selector.{ending}"
    there.write_text("precious")
    assert main([str(tmp_path / "selector")]) == 1
    assert f"{there}: File exists" in capsys.readouterr().err
    assert os.listdir(tmp_path) == [there.name]
    assert there.read_text() == "precious"


def test_a_pair_of_pyzmq_is_read(tmp_path: Path) -> None:
    public, secret = zmq.auth.create_certificates(tmp_path, "theirs")
    pair = read_pair(str(secret))
    assert (pair.public, pair.secret) == zmq.auth.load_certificate(secret)
    assert public_keys("it", Path(public).read_bytes()) == (pair.public,)


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


def test_a_list_has_keys_with_words_behind_them_comments_and_certificates() -> None:
    about = b'metadata\n    name = "b"\n    made-at = 8 o clock\n'
    certificate = b'%bcurve\n    public-key = "%b"\n' % (about, KEYS[1])
    text = b"# of all\n\n%b selector-a\n%b\n#%b\n%b\n" % (KEYS[0], certificate, KEYS[2], KEYS[0])
    assert public_keys("it", text) == (KEYS[0], KEYS[1])


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"# nothing\n", "it has no public key"),
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
def test_what_is_no_list_is_refused_by_its_line_and_never_cited(content: bytes, fault: str) -> None:
    with pytest.raises(BadKeys, match=fault) as told:
        public_keys("it", content)
    assert PAIR.secret.decode() not in str(told.value)
