"""`immortal web`: who is let in, from where, and what its answers forbid a browser."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from immortal.web.server import ROUTES
from tests.helpers.browser import WebServer, csrf_of
from tests.helpers.cli import DEADLINE_S, immortal

WITHOUT_END_MIB = 48
READER = "only-looks-0123456789"
FORMS = sorted(route.path for route in ROUTES if "POST" in (route.methods or ()))


def filled_in(path: str) -> str:
    """Return the path of a route with something that is there in each place."""
    for name, value in {"name": "counter", "id": "000000000000", "action": "checkpoint", "verb": "cancel"}.items():
        path = path.replace(f"{{{name}}}", value)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    folder = tmp_path_factory.mktemp("web")
    immortal(folder, "register", "counter", "--peer", "tcp://127.0.0.1:*")
    (folder / "reader").write_text(READER)
    (folder / "reader").chmod(0o600)
    made = WebServer(folder, "--allow-actions", "--reader-token-file", "reader")
    yield made
    assert made.stop() == 0
    assert "".join(made.said) == ""


def test_only_who_has_the_token_sees_anything(server: WebServer) -> None:
    status, _, headers = server.ask("/", headers={})
    assert (status, headers["location"]) == (303, "/login")
    assert server.ask("/live/fleet", headers={"Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"})[0] == 401
    for wrong in ("", "Bearer", "Bearer x", f"Basic {server.token}"):
        assert server.ask("/", headers={"Authorization": wrong})[0] == 303
    assert server.ask("/", headers={"Cookie": "immortal_web=x"})[0] == 303
    assert server.ask("/login?token=wrong", headers={})[0] == 401
    assert "counter" in server.ask("/")[1]


def test_the_address_that_it_prints_lets_a_browser_in(server: WebServer) -> None:
    status, _, headers = server.ask(f"/login?token={server.token}", headers={})
    assert (status, headers["location"]) == (303, "/")
    cookie, *how = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=lax", "Max-Age=43200", "Path=/"} <= set(how)
    assert server.token not in cookie
    assert server.ask("/", headers={"Cookie": cookie})[0] == 200
    others = 'immortal_web=x; {"a": [1, "b"]}; =; ' + f"{cookie.partition('=')[0]}=x"  # of other ports of this host
    assert server.ask("/", headers={"Cookie": f"{others}; {cookie}; {others}"})[0] == 200


def test_a_cookie_is_of_the_address_that_made_it(server: WebServer) -> None:
    """A browser sends it to each port of this host: who listens at another one has it."""
    cookie = cookie_of(server)
    name, _, value = cookie.partition("=")
    assert name == f"immortal_web_{server.port}"
    assert server.ask("/", headers={"Cookie": cookie, "Host": f"localhost:{server.port}"})[0] == 303
    until, _, rest = value.partition(".")
    for other in (f"{int(until) + 1}.{rest}", f"{until}.", rest, "", f"-{until}.{rest}", "9" * 400 + f".{rest}"):
        assert server.ask("/", headers={"Cookie": f"{name}={other}"})[0] == 303


@pytest.mark.parametrize("path", FORMS)
def test_a_cookie_lets_look_and_a_form_needs_the_token(server: WebServer, path: str) -> None:
    cookie = {"Cookie": cookie_of(server)}
    csrf = csrf_of(server.ask("/sql", headers=cookie)[1])
    filled = filled_in(path)
    form = f"csrf={csrf}&at=0:0&query=select+1&expression=1&text=x&new_app=a:B"
    for wrong in ("", "&token=", "&token=x", f"&token={server.token}x", f"&token=x&token={server.token}&token=x"):
        status, text, _ = server.ask(filled, "POST", form + wrong, cookie)
        assert (status, "type the token" in text) == (403, True)
    assert server.ask(filled, "POST", f"{form}&token={server.token}", cookie)[0] != 403
    assert server.ask(filled, "POST", form)[0] != 403  # the token is in the header
    assert server.ask(filled, "POST", f"at=0:0&token={server.token}", cookie)[0] == 403  # no page of ours


@pytest.mark.parametrize("path", FORMS)
def test_a_readers_token_lets_look_and_no_more(server: WebServer, path: str) -> None:
    header = {"Authorization": f"Bearer {READER}"}
    assert "counter" in server.ask("/", headers=header)[1]
    status, _, headers = server.ask(f"/login?token={READER}", headers={})
    assert (status, headers["location"]) == (303, "/")
    cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}
    csrf = csrf_of(server.ask("/sql", headers=header)[1])
    filled = filled_in(path)
    form = f"csrf={csrf}&at=0:0&query=select+1&expression=1&text=x&new_app=a:B&token={READER}"
    for shown in (header, cookie, header | cookie):
        assert server.ask(filled, "POST", form, shown)[0] == 403


def cookie_of(server: WebServer) -> str:
    return server.ask(f"/login?token={server.token}", headers={})[2]["set-cookie"].partition(";")[0]


def size_bytes_of(server: WebServer) -> int:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def send_all(stranger: socket.socket, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        stranger.sendall(piece)


CHUNKED = b"POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
MIB = b"x" * (1 << 20)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"A: b\r\n" * (1 << 17)),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: ", MIB),
        (b"GET /", MIB),
        (MIB, MIB),
        (b"\r\n", b"\r\n" * (1 << 19)),
        (CHUNKED + b"1;", MIB),
        (CHUNKED + b"0\r\n", b"A: b\r\n" * (1 << 17)),
        (CHUNKED, b"100000\r\n" + MIB + b"\r\n"),
        (CHUNKED + b"1\r\nx\r\nno chunk\r\n", MIB),
        (b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n", MIB),
        (b"GET /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n", MIB),
        (b"", b"GET /login HTTP/1.1\r\nHost: localhost\r\n\r\n" * (1 << 14)),
    ],
    ids=lambda given: repr(given[:24]),
)
def test_a_request_without_end_is_ended(server: WebServer, begin: bytes, piece: bytes) -> None:
    before = size_bytes_of(server)
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as stranger:
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_all(stranger, chain((begin,), repeat(piece, WITHOUT_END_MIB)))
        assert size_bytes_of(server) - before < 8 << 20
    assert server.ask("/")[0] == 200


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nHost: ", CHUNKED])
def test_silent_connections_keep_nobody_out(server: WebServer, begin: bytes) -> None:
    with ExitStack() as held:
        for _ in range(300):
            held.enter_context(socket.create_connection(("127.0.0.1", server.port))).sendall(begin)
        assert server.ask("/")[0] == 200
        assert server.ask("/login", headers={})[0] == 200


def test_no_other_protocol_is_spoken(server: WebServer) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x"}
    assert server.ask("/", headers=upgrade)[0] == 303
    assert server.ask("/", headers={**upgrade, "Upgrade": "h2c"})[0] == 303


def test_another_name_for_this_address_is_refused(server: WebServer) -> None:
    known = {"Authorization": f"Bearer {server.token}"}
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", "[", ""):
        assert server.ask("/", headers={**known, "Host": host})[0] == 421
    assert server.ask("/", headers={**known, "Host": f"LOCALHOST:{server.port}"})[0] == 200


def test_what_another_site_embeds_is_refused(server: WebServer) -> None:
    known = {"Authorization": f"Bearer {server.token}", "Sec-Fetch-Site": "cross-site"}
    link = {**known, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert server.ask("/", headers=link)[0] == 200
    for mode, destination in (("no-cors", "image"), ("navigate", "iframe"), ("cors", "empty")):
        assert server.ask("/", headers={**known, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": destination})[0] == 403


def test_forms_of_another_site_are_refused(server: WebServer) -> None:
    known = {"Authorization": f"Bearer {server.token}"}
    path = "/i/counter/checkpoint"
    assert server.ask(path, "POST", "", {**known, "Origin": "http://evil.example"})[0] == 403
    assert server.ask(path, "POST", "", {**known, "Origin": "null"})[0] == 403
    assert server.ask(path, "POST", "", {**known, "Sec-Fetch-Site": "cross-site"})[0] == 403
    assert server.ask(path, "POST", "{}", {**known, "Content-Type": "application/json"})[0] == 415
    assert server.ask(path, "POST", "x" * 100_000, known)[0] == 413


@pytest.mark.parametrize("path", ["/", "/login", "/nothing", "/i/counter", "/i/none", "/static/style.css"])
def test_no_answer_lets_a_script_in(server: WebServer, path: str) -> None:
    _, text, headers = server.ask(path)
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert "cache-control" in headers
    if path != "/static/style.css":
        assert headers["cache-control"] == "no-store"
    assert "<style" not in text
    assert " style=" not in text
    assert " onclick=" not in text


def test_what_is_not_there(server: WebServer) -> None:
    for path in ("/nothing", "/i/none", "/i/..%2f..%2fetc", "/i/%3Cscript%3E"):
        status, text, _ = server.ask(path)
        assert status == 404, path
        assert "<script>" not in text
    assert server.ask("/static/../web.py")[0] == 404


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ("--host", "0.0.0.0"),
            "can be reached from other machines: --tls-cert, --tls-key and --token-file are needed",
        ),
        (("--host", "192.0.2.1", "--token-file", "token"), "--tls-cert, --tls-key and --token-file"),
        (("--tls-cert", "token"), "--tls-cert and --tls-key go together"),
    ],
)
def test_beyond_loopback_only_with_tls_and_a_token(tmp_path: Path, options: tuple[str, ...], why: str) -> None:
    (tmp_path / "token").write_text("x" * 20)
    assert why in " ".join(immortal(tmp_path, "web", *options, status=2).split())


def test_it_ends_quietly_while_somebody_looks_on(tmp_path: Path) -> None:
    immortal(tmp_path, "register", "counter", "--peer", "tcp://127.0.0.1:*")
    server = WebServer(tmp_path)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", "/live/i/counter", headers={"Authorization": f"Bearer {server.token}"})
    answer = connection.getresponse()
    assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
    assert answer.readline() == b"event: overview\r\n"
    assert server.stop() == 0
    assert server.said == []
    connection.close()


def test_a_port_that_is_taken(server: WebServer, tmp_path: Path) -> None:
    said = immortal(tmp_path, "web", "--port", str(server.port), status=1)
    assert f"can't listen at 127.0.0.1:{server.port}: Address already in use" in said


def test_with_a_certificate_and_a_token_of_a_file(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run([*made, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    token = tmp_path / "token"
    token.write_text("a token of many characters\n")
    token.chmod(0o600)
    server = WebServer(
        tmp_path, "--host", "0.0.0.0", "--tls-cert", "certificate.pem", "--tls-key", "key.pem", "--token-file", "token"
    )
    try:
        assert server.login == f"https://0.0.0.0:{server.port}/"
        context = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection("localhost", server.port, context=context, timeout=20)
        connection.request("GET", "/login?token=a%20token%20of%20many%20characters")
        answer = connection.getresponse()
        cookie = str(answer.getheader("set-cookie"))
        assert cookie.startswith(f"__Host-immortal_web_{server.port}=")
        assert {"Secure", "Path=/"} <= set(cookie.split("; "))
        assert "Domain" not in cookie
        answer.read()
        connection.request("GET", "/", headers={"Authorization": "Bearer a token of many characters"})
        assert connection.getresponse().status == 200
        connection.close()
        with ExitStack() as held:  # who never ends the handshake
            silent = [held.enter_context(socket.create_connection(("localhost", server.port))) for _ in range(300)]
            connection.request("GET", "/login")
            assert connection.getresponse().status == 200
            silent[0].settimeout(DEADLINE_S)
            assert silent[0].recv(1) == b""
        connection.close()
    finally:
        assert server.stop() == 0


def test_a_certificate_that_is_none(tmp_path: Path) -> None:
    for name in ("certificate.pem", "key.pem"):
        (tmp_path / name).write_text("nothing")
    options = ("--tls-cert", "certificate.pem", "--tls-key", "key.pem")
    assert "the certificate and its key can't be used" in immortal(tmp_path, "web", *options, status=1)
