"""The file of tokens: what it may say, what is kept of it, and what becomes of a change."""

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from lean_selector.api.access import ADMIN, OPEN, READ, WRITE, AccessTokens, Role
from lean_selector.http.head import UNUSABLE, digest_of

FILE = b"""\
# who may look
read dashboard-7f3a
  # who may choose
write\tgateway~1/+==

admin operator.2
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_bytes(FILE)
    return path


def role_of(tokens: AccessTokens, token: bytes) -> Role:
    return tokens.role_of(digest_of(token))


def test_each_token_has_the_role_of_its_line(path: Path) -> None:
    tokens = AccessTokens(str(path))
    assert role_of(tokens, b"dashboard-7f3a") is READ
    assert role_of(tokens, b"gateway~1/+==") is WRITE
    assert role_of(tokens, b"operator.2") is ADMIN
    for other in (b"", b"dashboard-7f3", b"dashboard-7f3aa", b"Dashboard-7f3a", b"read", b"#"):
        assert role_of(tokens, other) is OPEN
    assert tokens.role_of(None) is OPEN
    assert tokens.role_of(UNUSABLE) is OPEN


def everything_in(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return [part for pair in thing.items() for each in pair for part in everything_in(each)]
    # The attributes of a compiled class stand in no __dict__.
    names = getattr(thing, "__mypyc_attrs__", None) or getattr(thing, "__dict__", None)
    if names and not isinstance(thing, Role):
        return [part for name in names for part in everything_in(getattr(thing, name))]
    return [thing]


def test_the_plain_text_is_not_kept(path: Path) -> None:
    tokens = AccessTokens(str(path))
    role_of(tokens, b"operator.2")
    tokens.reload(again=True)
    parts = everything_in(tokens)
    assert str(path) in parts  # it is all there
    assert digest_of(b"operator.2") in parts
    for part in parts:
        if part != str(path):
            text = pickle.dumps(part)
            assert not any(word in text for word in (b"dashboard", b"gateway", b"operator"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param(b"", "has no tokens: expected lines `ROLE TOKEN`", id="empty"),
        pytest.param(b"# read secret\n\n", "has no tokens", id="only a comment"),
        pytest.param(
            b"read a\nsecret\n", "line 2: the first word is not one of read, write", id="no role"
        ),
        pytest.param(b"secret admin\n", "line 1: the first word is not one of", id="turned round"),
        pytest.param(b"Read secret\n", "line 1: the first word is not one of", id="capitals"),
        pytest.param(b"\nread\n", "line 2: expected only a role", id="no token"),
        pytest.param(b"read secret a b\n", "line 1: expected only a role", id="four words"),
        pytest.param(b"read a secret=high\n", "line 1: the word after the token", id="no name"),
        pytest.param(b"read a " + b"secret" * 6, "line 1: the word after", id="two tokens"),
        pytest.param(b"read a max-priority=low", "line 1: the word after", id="no right"),
        pytest.param(b"read a max-priority=high secret", "line 1: expected only", id="order"),
        pytest.param(b"read max-priority=high", "line 1: expected only", id="a right alone"),
        pytest.param(b"read sec:ret\n", "line 1: the token has characters other", id="a colon"),
        pytest.param("read sécret\n".encode(), "line 1: the token has characters", id="no ASCII"),
        pytest.param(b"read =secret\n", "line 1: the token has characters", id="= at the front"),
        pytest.param(b"read secret\x00\n", "line 1: the token has characters", id="NUL"),
        pytest.param(
            b"read secret\n#\nadmin secret\n", "line 3: the same token as on line 1", id="twice"
        ),
    ],
)
def test_a_bad_file_is_refused_by_its_line_without_repeating_a_token(
    path: Path, text: bytes, complaint: str
) -> None:
    path.write_bytes(text)
    with pytest.raises(ValueError, match="tokens") as caught:
        AccessTokens(str(path))
    assert complaint in str(caught.value)
    assert "secret" not in str(caught.value).lower()
    assert "écret" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        AccessTokens(str(tmp_path / "nowhere"))


def test_a_file_of_more_than_a_mebibyte_is_refused(path: Path) -> None:
    path.write_bytes(b"#" * (1 << 20) + b"\nread a\n")
    with pytest.raises(OSError, match="more than 1048576 bytes"):
        AccessTokens(str(path))


def test_a_change_is_taken_over_in_place(path: Path) -> None:
    tokens = AccessTokens(str(path))
    roles = tokens.roles
    assert role_of(tokens, b"operator.2") is ADMIN
    path.write_bytes(b"read operator.2\nadmin new\n")
    tokens.reload()
    assert tokens.roles is roles
    assert role_of(tokens, b"operator.2") is READ
    assert role_of(tokens, b"new") is ADMIN
    assert role_of(tokens, b"dashboard-7f3a") is OPEN


def test_a_name_is_that_of_its_token_until_the_line_changes(path: Path) -> None:
    path.write_bytes(b"write one team-a\nwrite two\nwrite three max-priority=high\n")
    tokens = AccessTokens(str(path))
    names = tokens.names
    assert tokens.urgent == {digest_of(b"three")}
    assert (names.get(digest_of(b"one")), names.get(digest_of(b"two"))) == ("team-a", None)
    path.write_bytes(b"write two team-b max-priority=high\n")
    tokens.reload()
    assert tokens.urgent == {digest_of(b"two")}
    assert tokens.names == {digest_of(b"two"): "team-b"}


def test_a_change_that_does_not_show_is_taken_over_when_it_is_told(path: Path) -> None:
    """The same size, the same file, and the same time of change, as some file systems have it."""
    tokens = AccessTokens(str(path))
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.write(FILE.replace(b"operator.2", b"operator.3"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    tokens.reload()
    assert role_of(tokens, b"operator.3") is OPEN
    tokens.reload(again=True)
    assert role_of(tokens, b"operator.3") is ADMIN
    assert role_of(tokens, b"operator.2") is OPEN


def test_a_file_that_breaks_leaves_the_tokens_and_is_complained_of_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = AccessTokens(str(path))
    caplog.set_level(logging.INFO, "lean_selector.access")
    path.write_bytes(b"read secret\nsecret2\n")
    tokens.reload()
    tokens.reload()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{path}, line 2: " in record.getMessage()
    assert "secret" not in record.getMessage()
    assert role_of(tokens, b"operator.2") is ADMIN
    assert role_of(tokens, b"secret") is OPEN
    path.unlink()
    tokens.reload()
    tokens.reload()
    assert len(caplog.records) == 1 + 1
    assert role_of(tokens, b"operator.2") is ADMIN
    path.write_bytes(b"read new\n")
    tokens.reload()
    assert caplog.records[-1].getMessage() == "tokens were read again"
    assert role_of(tokens, b"operator.2") is OPEN
