"""The port of the metrics: those who hold it, those who are slow, and those from elsewhere."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from immortal.coordinator.notices import metrics_server as metrics
from immortal.coordinator.notices.metrics_server import Access, MetricsError
from tests.helpers.notices import Told, serve_status
from tests.helpers.processes import DEADLINE_S, House

TOKEN = "0123456789abcdef0123"


def ask() -> dict[str, object]:
    return {"phase": "normal"}


def get(url: str, *, token: str | None = None, trusted: Path | None = None) -> tuple[int, bytes]:
    """Status and body. ``trusted``: the certificate to be shown."""
    parts = urlsplit(url)
    host, port = "127.0.0.1", parts.port
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=trusted)
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(host, port, timeout=20, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def is_up(url: str, **options: object) -> bool:
    status, body = get(url, **options)  # type: ignore[arg-type]
    return status == 200 and b'immortal_up{instance_name="counter"} 1.0' in body


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=DEADLINE_S)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=counter", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return paths


# --- from elsewhere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0:*", "[::]:*", "example.org:9400"])
def test_beyond_loopback_nobody_can_ask_without_more(address: str) -> None:
    with pytest.raises(MetricsError, match="would be open to whoever reaches that address: give metrics_token_file"):
        serve_status(address, ask)


def test_insecure_has_to_be_said_and_is_said_again() -> None:
    told = Told()
    assert is_up(serve_status("0.0.0.0:*", ask, Access(insecure=True), told))
    line = "INSECURE, as asked for: whoever reaches 0.0.0.0:* can read the metrics"
    assert ("warning", line, {}) in told.lines


def test_a_stranger_without_the_token_is_told_nothing(token_file: Path) -> None:
    url = serve_status("0.0.0.0:*", ask, Access(token_file))
    for brought in (None, "", "x", TOKEN[:-1], TOKEN + "x", "ä"):
        status, body = get(url, token=brought)
        assert (status, body) == (401, b"a token is needed\n")
    assert is_up(url, token=TOKEN)


def test_another_token_needs_no_restart(token_file: Path) -> None:
    url = serve_status("127.0.0.1:*", ask, Access(token_file))
    token_file.write_text("a" * 20)
    assert get(url, token=TOKEN)[0] == 401
    assert is_up(url, token="a" * 20)
    token_file.chmod(0o644)
    assert get(url, token="a" * 20)[0] == 503


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        (TOKEN, 0o644, "has mode 0644, expected 0600"),
        ("", 0o600, "holds no token: 16 or more letters"),
        ("short", 0o600, "holds no token"),
        ("two words and more of them", 0o600, "holds no token"),
    ],
)
def test_a_token_that_is_none_keeps_it_from_starting(token_file: Path, text: str, mode: int, problem: str) -> None:
    token_file.write_text(text)
    token_file.chmod(mode)
    with pytest.raises(MetricsError, match=problem):
        serve_status("127.0.0.1:*", ask, Access(token_file))


def test_a_token_that_is_missing_keeps_it_from_starting(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="can't be read: No such file"):
        serve_status("127.0.0.1:*", ask, Access(tmp_path / "none"))


def test_with_a_certificate_it_is_encrypted(certificate: tuple[Path, Path], token_file: Path) -> None:
    url = serve_status("0.0.0.0:*", ask, Access(token_file, *certificate))
    assert url.startswith("https://")
    assert is_up(url, token=TOKEN, trusted=certificate[0])
    assert get(url, trusted=certificate[0])[0] == 401
    with connect(url) as plain:
        plain.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b"immortal" not in plain.recv(1000)


def test_a_certificate_that_can_not_be_used(tmp_path: Path) -> None:
    for path in (paths := (tmp_path / "certificate.pem", tmp_path / "key.pem")):
        path.write_text("x")
    with pytest.raises(MetricsError, match="the certificate of the metrics can't be used"):
        serve_status("127.0.0.1:*", ask, Access(None, *paths))


# --- time and number -------------------------------------------------------------------------------------------------


def test_silent_connections_take_a_bounded_number_of_threads_and_have_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_TIMEOUT_S", 1.0)
    url = serve_status("127.0.0.1:*", ask)
    before = threading.active_count()
    silent = [connect(url) for _ in range(30)]
    late = silent[metrics.CONNECTIONS_MAX :]
    assert [one.recv(1) for one in late] == [b""] * len(late)
    assert threading.active_count() <= before + metrics.CONNECTIONS_MAX
    assert [one.recv(1) for one in silent[: metrics.CONNECTIONS_MAX]] == [b""] * metrics.CONNECTIONS_MAX
    assert is_up(url)
    for one in silent:
        one.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_who_sends_a_byte_now_and_then_is_cut_off(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_TIMEOUT_S", 0.5)
    url = serve_status("127.0.0.1:*", ask, Access(None, *certificate) if encrypted else None)
    began_s = time.monotonic()
    with connect(url) as slow:
        slow.settimeout(0.1)
        while time.monotonic() < began_s + DEADLINE_S:
            try:
                # What begins a TLS record of 16 KiB, and a header, alike: more of it is waited for.
                slow.sendall(b"\x16\x03\x01\x40\x00" if encrypted and time.monotonic() < began_s + 0.05 else b"x")
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert time.monotonic() - began_s < 5


def test_the_settings_say_how_it_is_reached(tmp_path: Path, token_file: Path) -> None:
    house = House(tmp_path / "home")
    try:
        house.register("counter")
        path = house.registry.path("counter")
        path.write_text(path.read_text() + 'metrics = "0.0.0.0:*"\n')
        assert "would be open to whoever reaches that address" in house.start("counter", started=False).failed()
        path.write_text(path.read_text() + 'metrics_token_file = "../token"\n')
        line = house.start("counter").line("metrics are served")
        url = line.partition("at=")[2]
        assert get(url)[0] == 401
        assert is_up(url, token=TOKEN)
    finally:
        house.close()
