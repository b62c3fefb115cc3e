"""The runbook: each of its symptoms is made, shows as the page says, sets off its alerts, and ends by its commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from immortal.coordinator.instances.registry import free_port
from immortal.coordinator.operator import control
from tests.helpers import commands
from tests.helpers.cli import Run, wait_until
from tests.helpers.postgres import Postgres
from tests.helpers.prometheus import RULES, SERVER, Prometheus

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PAGE = (HOW_TO / "runbook.md").read_text()
PROGRAM = re.findall(r"```python\n(# shop\.py\n.*?)```", (HOW_TO / "operations.md").read_text(), re.DOTALL)[0]
HOME = ".immortal"
CALLS = "salt 1\n" * 3
Mend = Callable[[], None]


class Shop:
    """The two services of the page, which run. ``home``: where its own log is kept, the folder or a database."""

    def __init__(self, folder: Path, prometheus: Prometheus | None) -> None:
        self.folder = folder
        self.prometheus = prometheus
        self.runs: dict[str, Run] = {}
        (folder / "shop.py").write_text(PROGRAM)
        (folder / "customers.txt").write_text(CALLS)

    def register(self, name: str, *options: str) -> None:
        metrics = f"127.0.0.1:{free_port(('127.0.0.1',), set())}"
        app = f"shop:{name.title()}"
        self.immortal("register", name, "--peer", "tcp://127.0.0.1:*", "--metrics", metrics, "--app", app, *options)
        if self.prometheus is not None:
            self.prometheus.scrape(metrics)

    def start(self, name: str, *options: str) -> Run:
        run = self.runs[name] = Run(self.folder, name, *options, home=HOME)
        return run

    def kill(self, name: str) -> None:
        self.runs[name].kill()

    def write(self, old: str = "", new: str = "") -> None:
        """Change the program; without arguments, bring back the one of the page."""
        assert old in PROGRAM
        (self.folder / "shop.py").write_text(PROGRAM.replace(old, new) if old else PROGRAM)

    def immortal(self, *arguments: str, given: str | None = None) -> str:
        done = commands.run(self.folder, *arguments, given=given)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout or done.stderr

    def until_till_has(self, calls: int) -> None:
        """Wait until so many calls of stock are on till's disk."""

        def there() -> bool:
            outputs = control.query(self.folder / HOME / "stock", "status")["outputs"]
            return "till" in outputs and outputs["till"]["acknowledged"] == calls

        wait_until(there)

    # --- the page ----------------------------------------------------------------------------------------------------

    def follow(self, heading: str, name: str, mend: Mend = lambda: None) -> None:
        """See the symptom of an instance, its alerts, and type what the page says. ``mend``: before the last block."""
        section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        assert section, heading
        front, *_ = section.partition("```")
        blocks = re.findall(r"```(\w*)\n(.*?)```", section, re.DOTALL)
        for kind, text in blocks:
            for line in text.splitlines() if kind == "text" else ():
                self._see(line, *self.runs.values())
        for alert in re.findall(r"`(Immortal\w+)`(?! comes before)", front) if self.prometheus else ():
            self.prometheus.wait(alert, name)
        typed = [text for kind, text in blocks if not kind]
        for text in typed:
            if text is typed[-1]:
                mend()
            for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
                self._type(self._here(command), shown)

    def _see(self, line: str, *runs: Run) -> None:
        try:
            wait_until(lambda: any(is_shown(line, one) for run in runs for one in run.lines))
        except AssertionError:
            raise AssertionError("\n".join([line, *(run.text for run in runs)])) from None

    def _here(self, command: str) -> str:
        return command.replace("/mnt/", f"{self.folder}/")

    def _type(self, command: str, shown: str) -> None:
        words = shlex.split(command)
        if words[:2] == ["immortal", "run"]:
            run = self.start(*words[2:])
            for line in shown.splitlines():
                self._see(line, run)
            return
        if words[0] == "immortal":
            said = self.immortal(*words[1:], given="y\n" if "[y/N]: y\n" in shown else None)
        else:
            said = subprocess.run(["sh", "-ec", command], cwd=self.folder, capture_output=True, text=True).stdout
        said = said.replace(f"{self.folder}", "/home/you/shop").replace("[y/N]: reset", "[y/N]: y\nreset")
        assert is_shown(shown, said), f"{command}\n{said}"


def is_shown(shown: str, said: str) -> bool:
    """Return True if the page shows what was said: "..." stands for anything, and figures differ."""
    lines = [re.escape(line).replace(r"\.\.\.", ".*") + "\n" for line in plain(shown)]
    pattern = "".join("(?:.*\n)*" if line == ".*\n" else line for line in lines)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in plain(said))) is not None


def plain(text: str) -> list[str]:
    text = re.sub(r"(?m)^\d\d:\d\d:\d\d\.\d+ ", "", re.sub(rf"\b{socket.gethostname()}\b", "a.example", text))
    return [re.sub(r"\d+(?:[.,]\d+)*", "0", re.sub(" +", " ", line)).strip() for line in text.splitlines()]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus | None]:
    if SERVER is None:
        yield None
        return
    server = Prometheus(tmp_path_factory.mktemp("prometheus"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, prometheus: Prometheus | None) -> Iterator[Shop]:
    """One shop for all: each section of the page leaves it as well as it was."""
    shop = Shop(tmp_path_factory.mktemp("shop"), prometheus)
    for name in ("stock", "till"):
        shop.register(name, "--keep-checkpoints", "all", "--log-limit-mb", "1")
        shop.start(name, "--restart")
    for run in shop.runs.values():
        run.line("ready")
    shop.until_till_has(3)
    yield shop
    for run in shop.runs.values():
        run.kill()


def test_a_log_is_full(shop: Shop) -> None:
    shop.immortal("call", "till", "sold", "x" * 1_200_000, "1")
    shop.runs["till"].line("input from peers and impulses are held back")  # the size is looked at once a second
    assert "note     home          till: input from peers and impulses are held back" in shop.immortal("doctor", "till")
    shop.follow("A log is full", "till")
    shop.immortal("call", "till", "sold", "tea", "1")


def test_a_peer_is_refused(shop: Shop) -> None:
    shop.immortal("stop", "till")
    shutil.rmtree(shop.folder / HOME / "till" / "log")
    shop.start("till", "--restart")
    shop.follow("A peer is refused", "stock")
    shop.runs["stock"].line("the stream was reset and continues")
    shop.until_till_has(6)


def test_a_start_finds_other_calls(shop: Shop) -> None:
    shop.immortal("checkpoint", "stock")
    for _ in range(3):
        shop.immortal("call", "stock", "order", "salt", "1")
    shop.kill("stock")
    shop.write("self.till.refused.fork(item)", "self.till.sold.fork(item, count)")
    shop.start("stock", "--restart")
    shop.follow("A start finds other calls", "stock", shop.write)


def test_a_message_ends_the_app(shop: Shop) -> None:
    shop.write("self.till.refused.fork(item)", "import os; os.abort() if count == 7 else self.till.refused.fork(item)")
    shop.immortal("restart", "stock")
    (shop.folder / "customers.txt").write_text(f"{CALLS}salt 7\n")
    shop.immortal("restart", "till")
    shop.follow("A message ends the app", "stock", shop.write)
    assert "no dead letters" in shop.immortal("dead-letters", "stock")


def test_a_disk_is_lost(shop: Shop) -> None:
    shop.immortal("archive", "stock", "--to", f"file://{shop.folder}/archive", "--once")
    shop.kill("stock")
    shutil.rmtree(shop.folder / HOME / "stock" / "log")
    shop.follow("A disk is lost", "stock")


def test_a_writer_is_fenced(postgres: Postgres, prometheus: Prometheus | None, tmp_path: Path) -> None:
    shop = Shop(tmp_path, prometheus)
    shop.register("stock", "--log", postgres.url("stock"), "--lease-s", "1")
    shop.start("stock", "--restart").line("ready")
    there = another_machine(shop)
    there.line("following")
    found = control.running(shop.folder / HOME / "stock")
    assert found is not None
    os.kill(found.pid, signal.SIGSTOP)
    there.line("recovered")
    os.kill(found.pid, signal.SIGCONT)
    try:
        shop.follow("A writer is fenced", "stock", lambda: follows(shop))
    finally:
        for run in shop.runs.values():
            run.kill()


def follows(shop: Shop) -> None:
    shop.runs["stock"].line("following")
    wait_until(lambda: control.query(shop.folder / HOME / "stock/followers/1", "status")["phase"] == "following")


def another_machine(shop: Shop) -> Run:
    """Run stock on another one: from a home with the same keys and its own addresses."""
    here, folder = shop.folder / HOME, shop.folder / "there"
    home = folder / HOME
    shutil.copytree(here / "stock" / "keys", home / "stock" / "keys")
    shutil.copy(here / "stock" / "public_keys", home / "stock")
    shutil.copy(shop.folder / "shop.py", folder)
    home.chmod(0o700)
    settings = (here / "stock.toml").read_text()
    ports = {port: str(free_port(("127.0.0.1",), set())) for port in re.findall(r"127\.0\.0\.1:(\d+)", settings)}
    (home / "stock.toml").write_text(re.sub("|".join(ports), lambda found: ports[found[0]], settings))
    if shop.prometheus is not None:
        shop.prometheus.scrape(*(f"127.0.0.1:{port}" for port in ports.values()))
    run = shop.runs["there"] = Run(folder, "stock", "--restart", home=HOME)
    return run


def test_the_alerts_lead_to_the_page() -> None:
    headings = {f"#{heading.lower().replace(' ', '-')}" for heading in re.findall(r"\n## (.+)", PAGE)}
    rules = RULES.read_text()
    led = re.findall(r'runbook_url: "docs/how-to/runbook\.md(.*)"', rules)
    assert set(led) == {"", *headings} - {
        "#a-start-finds-other-calls",
        "#a-disk-is-lost",
    }  # these are "": a process is gone
    assert set(re.findall(r"`(Immortal\w+)`", PAGE)) == {
        alert for alert, rule in re.findall(r"- alert: (\w+)\n((?:.+\n)+)", f"{rules}\n") if "runbook_url" in rule
    }


def test_prometheus_reads_the_rules(shop: Shop, prometheus: Prometheus | None) -> None:
    if prometheus is None:
        pytest.skip("there is no prometheus here, no alert was seen: 'apt-get install prometheus'")
    rules = prometheus.rules()
    assert len(rules) == RULES.read_text().count("- alert:")
    assert [rule for rule in rules if rule["health"] != "ok"] == []
