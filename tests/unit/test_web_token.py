"""What opens the page: the token, its file, and what a browser keeps of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("starlette")

from immortal.web import WebError
from immortal.web.auth import COOKIE_AGE_S, Token, new_token, read_token

ORIGIN = "http://127.0.0.1:8000"


def test_a_token_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a token of many characters\n")
    file.chmod(0o600)
    assert read_token(file) == "a token of many characters"


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("a token of many characters", 0o644, "mode 0644, expected 0600"),
        ("short", 0o600, "has 5 characters: at least 16 were expected"),
        ("x" * 5000, 0o600, "has 5000 bytes"),
        ("\udcff" * 20, 0o600, "cannot be read as a token"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, mode: int, why: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(text.encode(errors="surrogateescape"))
    file.chmod(mode)
    with pytest.raises(WebError, match=why):
        read_token(file)
    with pytest.raises(WebError, match="cannot be read as a token: No such file"):
        read_token(tmp_path / "none")


def test_what_is_derived_is_not_the_token() -> None:
    text = new_token()
    with pytest.raises(WebError, match="the reader's token is the same as the full token"):
        Token(text, text)
    token, later, other = Token(text), Token(text), Token(new_token())
    cookie = token.cookie(ORIGIN, 1000.0)
    assert token.is_right(text)
    assert not token.is_right(cookie)
    assert not token.is_right("\udcff")
    assert token.csrf != later.csrf
    assert later.cookie_end_s(cookie, ORIGIN, 1000.0) == 1000.0 + COOKIE_AGE_S
    assert not later.is_csrf(token.csrf)
    assert other.cookie_end_s(cookie, ORIGIN, 1000.0) is None


@pytest.mark.parametrize(
    ("origin", "now_s"),
    [
        ("https://127.0.0.1:8000", 1000.0),
        ("http://127.0.0.1:8001", 1000.0),
        ("http://localhost:8000", 1000.0),
        (ORIGIN, 1000.0 + COOKIE_AGE_S),
        (ORIGIN, 0.0),  # a clock that went back makes it last no longer
    ],
)
def test_a_cookie_is_of_one_origin_and_for_12_hours(origin: str, now_s: float) -> None:
    token = Token(new_token())
    cookie = token.cookie(ORIGIN, 1000.9)
    assert token.cookie_end_s(cookie, ORIGIN, 999.0 + COOKIE_AGE_S) == 1000 + COOKIE_AGE_S
    assert token.cookie_end_s(cookie, origin, now_s) is None
    until, _, check = cookie.partition(".")
    for wrong in ("", ".", until, check, f"{until}0.{check}", f"0{until}.{check}", f"²{until}.{check}", "\udcff.x"):
        assert token.cookie_end_s(wrong, ORIGIN, 1000.0) is None
