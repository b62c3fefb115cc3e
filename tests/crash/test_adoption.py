"""examples/adoption: the same program, plain and durable. Both do the same; after a kill -9 the durable one goes on."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.helpers.cli import DEADLINE_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "adoption"
DOCUMENTS = 6
LET_GO = 3  # so many are given while others are held back


class Documents(ThreadingHTTPServer):
    """Each has two pages. Those from number LET_GO on wait until ``rest`` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rest = threading.Event()
        self.asked: list[int] = []
        self.urls = [f"http://127.0.0.1:{self.server_address[1]}/{number}" for number in range(DOCUMENTS)]

    def handle_error(self, request: object, client_address: object) -> None:
        """The one that asked was killed."""


class _Handler(BaseHTTPRequestHandler):
    server: Documents

    def do_GET(self) -> None:
        number = int(self.path[1:])
        self.server.asked.append(number)
        if number >= LET_GO:
            self.server.rest.wait(DEADLINE_S)
        text = f"an apple of document {number}\fpage two".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words: object) -> None:
        """Not shown."""


@pytest.fixture
def documents() -> Iterator[Documents]:
    server = Documents()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.rest.set()
        server.shutdown()
        thread.join()
        server.server_close()


class Program:
    """plain.py or durable.py as a process."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.name = name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._start()

    def _start(self) -> None:
        command = [sys.executable, str(EXAMPLE / self.name), str(self.port)]
        self._log = (self.folder / "output").open("ab")
        self.process = subprocess.Popen(command, cwd=self.folder, stdout=self._log, stderr=subprocess.STDOUT)
        self.wait_for(lambda: self.search() is not None)

    def kill_and_start_again(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._log.close()

    def said(self) -> str:
        return (self.folder / "output").read_text()

    def index(self, urls: list[str]) -> int:
        body = json.dumps({"urls": urls}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/index", body)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return int(answer.status)

    def search(self) -> list[str] | None:
        """The documents with an apple; None while nobody answers."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/search?word=apple", timeout=DEADLINE_S
            ) as answer:
                found: list[str] = json.load(answer)
                return found
        except OSError:
            assert self.process.poll() is None, self.said()
            return None

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, self.said()
            threading.Event().wait(0.02)


@pytest.fixture(params=["plain.py", "durable.py"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Program]:
    pytest.importorskip("uvicorn", reason="the extra 'http' is not installed")
    made = Program(request.param, tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_both_do_the_same(program: Program, documents: Documents) -> None:
    documents.rest.set()
    assert program.index(documents.urls) == 204
    assert program.search() == documents.urls
    program.wait_for(lambda: f"indexed {DOCUMENTS} documents with {2 * DOCUMENTS} pages" in program.said())


def test_a_kill_in_the_middle(program: Program, documents: Documents) -> None:
    asking = threading.Thread(target=ask_a_server_that_dies, args=(program, documents.urls))
    asking.start()
    program.wait_for(lambda: program.search() == documents.urls[:LET_GO] and len(set(documents.asked)) > LET_GO)
    program.kill_and_start_again()
    asking.join()
    if program.name == "plain.py":  # nobody is left who knows of the rest
        documents.rest.set()
        assert program.search() == documents.urls[:LET_GO]
        return
    documents.rest.set()
    program.wait_for(lambda: program.search() == documents.urls)
    program.wait_for(lambda: f"indexed {DOCUMENTS} documents with {2 * DOCUMENTS} pages" in program.said())


def ask_a_server_that_dies(program: Program, urls: list[str]) -> None:
    with contextlib.suppress(OSError):
        program.index(urls)


def code_lines(name: str) -> list[str]:
    """The lines of code: without the docstring, comments of their own and blank lines."""
    program = (EXAMPLE / name).read_text().split('"""\n', 1)[1]
    return [line for line in program.splitlines() if line.strip() and not line.startswith("#")]


def test_the_lines_that_were_changed() -> None:
    """The figure of docs/explanation/performance.md."""
    plain, durable = code_lines("plain.py"), code_lines("durable.py")
    new = [line for line in difflib.ndiff(plain, durable) if line.startswith("+ ")]
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "performance.md").read_text()
    said = f" has {len(plain)} lines before .* and {len(durable)} after .* \\*\\*{len(new)} are new or changed"
    assert re.search(said, " ".join(text.split()))
