"""Pods of the Helm chart: its very commands, environment, probes and hooks, as processes."""

from __future__ import annotations

import signal
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from immortal.coordinator.instances.registry import free_port
from tests.helpers.chart import WAIT_S, Pod, render
from tests.helpers.cli import immortal
from tests.helpers.postgres import Postgres
from tests.soak.service import wait_for

pytest.importorskip("helm_python", reason="there is no Helm for this machine: helm-python-sdk renders the chart")

COUNTER = """
from immortal import Immortal, rpc


class Counter(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc
    def add(self, number: int) -> int:
        self.count += number
        return self.count
"""
TWICE = """
import counting
from immortal import Immortal, rpc, upgrades


@upgrades(counting.Counter)
class Counter(Immortal):
    count: int

    def __init__(self) -> None:
        self.count = 0

    @classmethod
    def upgrade(cls, old: counting.Counter) -> "Counter":
        new = cls()
        new.count = old.count
        return new

    @rpc
    def add(self, number: int) -> int:
        self.count += 2 * number
        return self.count
"""
APP = {"app": {"class": "counting:Counter"}}
CODE = {"counting.py": COUNTER}
TOKEN = "a-token-that-nobody-guesses"


@pytest.fixture
def pods() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def a_port() -> int:
    return free_port(("127.0.0.1",), set())


def add(pod: Pod, number: int) -> int:
    """What the counter says, asked in the app's container."""
    done = pod.exec("app", "immortal", "call", "counter", "add", str(number))
    assert done.returncode == 0, done.stderr + pod.log("coordinator") + pod.log("app")
    return int(done.stdout)


def test_a_pod_takes_calls_comes_back_and_ends_with_a_checkpoint(pods: ExitStack) -> None:
    metrics_port = a_port()
    metrics = {"port": metrics_port, "tokenSecret": "token"}
    objects = render(APP | {"peerPort": a_port(), "metrics": metrics, "settings": "keep_checkpoints = 'all'\n"})
    pod = Pod(objects, CODE, {"token": {"token": TOKEN}})
    pods.callback(pod.remove)
    pod.start()
    pod.until_ready()
    assert add(pod, 5) == 5
    assert "counter is ready: normal" in pod.probe("coordinator", "readinessProbe").stdout

    pod.kill("app")
    wait_for(lambda: pod.probe("coordinator", "readinessProbe").returncode == 1, lambda: "it is not ready", WAIT_S)
    assert "counter is not ready: waiting for the app" in pod.probe("coordinator", "readinessProbe").stderr
    assert pod.probe("coordinator", "livenessProbe").returncode == 0
    pod.start_container("app")
    pod.until_ready()
    assert add(pod, 1) == 6

    pod.kill("coordinator")
    done = pod.probe("coordinator", "livenessProbe")
    assert (done.returncode, done.stdout) == (1, "")
    assert "does not run" in done.stderr
    pod.processes["app"].wait(WAIT_S)  # it ends with its coordinator, and the kubelet starts both
    pod.start_container("coordinator")
    pod.start_container("app")
    pod.until_ready()
    assert add(pod, 1) == 7

    assert 'immortal_up{instance_name="counter"} 1.0' in metrics_of(metrics_port, TOKEN)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        metrics_of(metrics_port, "another one")

    checkpoints_count = pod.log("coordinator").count('"checkpoint taken"')
    hook, statuses = pod.end()
    if hook.returncode != -signal.SIGKILL:  # as the app's process ends, so does what is executed in its container
        assert (hook.returncode, "counter is stopped, with checkpoint" in hook.stdout) == (0, True), hook
    assert pod.log("coordinator").count('"checkpoint taken"') == checkpoints_count + 1
    assert statuses == {"coordinator": 0, "app": 0}

    pod.start()  # another pod with the same volume
    pod.until_ready()
    assert add(pod, 1) == 8


def metrics_of(port: int, token: str) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def test_keys_of_a_secret_and_what_a_volume_has_opened_to_a_group(pods: ExitStack) -> None:
    values = APP | {"peerPort": a_port(), "settings": "log_key = 'file'"}
    keys: dict[str, str] = {}
    pod = Pod(render(values), CODE, {"keys": keys})
    pods.callback(pod.remove)
    pod.start()
    pod.until_ready()
    assert add(pod, 5) == 5
    pod.end()
    folder = pod.home / "counter" / "keys"
    keys |= {name: (folder / name).read_text() for name in ("pairs", "log_key")}
    for file in (pod.home, *pod.home.rglob("*")):  # as fsGroup does where a driver does not know OnRootMismatch
        if not file.is_socket():
            file.chmod(file.stat().st_mode | (0o2070 if file.is_dir() else 0o060))
    for name in keys:
        (folder / name).unlink()  # they come from the Secret from now on
    pod.change(render(values | {"keysSecret": "keys"}), CODE)
    pod.start()
    pod.until_ready()
    assert add(pod, 1) == 6
    for name, text in keys.items():
        assert ((folder / name).read_text(), stat.S_IMODE((folder / name).stat().st_mode)) == (text, 0o600)


def test_an_upgrade_is_asked_for_and_done_by_the_roll_out_of_its_code(pods: ExitStack) -> None:
    port = a_port()
    pod = Pod(render(APP | {"peerPort": port}), CODE)
    pods.callback(pod.remove)
    pod.start()
    pod.until_ready()
    assert add(pod, 5) == 5
    asked = pod.exec("app", "immortal", "upgrade", "counter", "--to", "2")
    assert asked.returncode == 0, asked.stderr
    pod.end()
    pod.change(render({"app": {"class": "twice:Counter"}, "peerPort": port}), {"twice.py": TWICE})
    pod.start()
    pod.until_ready()
    assert add(pod, 5) == 15


def test_a_standby_takes_over_and_the_pod_that_was_killed_follows(
    pods: ExitStack, postgres: Postgres, tmp_path: Path
) -> None:
    immortal(tmp_path, "register", "counter", "--peer", "tcp://127.0.0.1:*")
    pairs = (tmp_path / "home" / "counter" / "keys" / "pairs").read_text()
    postgres.folder.chmod(0o711)  # its socket is in it, and the pods are not its user
    log = {"postgresql": postgres.url() + f"#{tmp_path.name}", "passwordSecret": "password"}
    objects = render(APP | {"replicas": 2, "log": log, "keysSecret": "keys", "peerPort": a_port()})
    secrets = {"keys": {"pairs": pairs}, "password": {"pgpass": "*:*:*:owner:secret\n"}}
    first, second = (Pod(objects, CODE, secrets, address) for address in ("127.0.0.1", "127.0.0.2"))
    for pod in (first, second):
        pods.callback(pod.remove)
        pod.start()
        pod.until_ready()
    assert stat.S_IMODE((first.home / "counter" / "keys" / "pgpass").stat().st_mode) == 0o600
    assert add(first, 5) == 5
    said = second.probe("coordinator", "readinessProbe").stdout
    assert said == "counter is ready: following\n"

    first.kill("app")
    first.kill("coordinator")
    wait_for(lambda: phase(second) == "normal", lambda: second.log("coordinator"), WAIT_S)
    assert add(second, 1) == 6

    first.start_container("coordinator")
    first.start_container("app")
    first.until_ready()
    assert phase(first) == "following"
    hook, statuses = second.end()
    assert hook.returncode in (0, -signal.SIGKILL), hook
    assert statuses == {"coordinator": 0, "app": 0}
    wait_for(lambda: phase(first) == "normal", lambda: first.log("coordinator"), WAIT_S)
    assert add(first, 1) == 7

    second.start()
    second.until_ready()
    hook, statuses = second.end()  # one that follows
    assert (hook.returncode, statuses) == (0, {"coordinator": 0, "app": 128 + signal.SIGTERM}), hook
    assert add(first, 1) == 8


def phase(pod: Pod) -> str:
    return pod.probe("coordinator", "readinessProbe").stdout.rpartition(": ")[2].strip()
