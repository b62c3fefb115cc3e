"""Helm chart, rendered by Helm itself, and its pods as processes of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.soak.service import wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "chart"
WAIT_S = 60.0
_SETPRIV = ("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
# Root without capabilities is an ordinary user: file modes apply.
WITHOUT_CAPABILITIES = _SETPRIV if os.geteuid() == 0 and shutil.which("setpriv") else ()
OWN_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
# Runs in a process of its own: Helm is Go, with threads and signal handlers.
_HELM = """
import json, sys
import helm_python
chart, values, release = json.load(sys.stdin)
try:
    helm_python.Chart.load(chart).validate_schema(values)
    result = helm_python.Chart.load(chart).render(values, **release)
    report = helm_python.chart.lint(chart, values, strict=True)
except helm_python.HelmError as error:
    sys.exit(str(error))
json.dump([result, report], sys.stdout)
"""
Object = dict[str, Any]


class ChartError(Exception):
    """Raised when Helm refuses the chart."""


def render(values: Object, *, release: str = "counter", namespace: str = "shop") -> list[Object]:
    """Return the objects of the chart, which must pass Helm's lint. Raises ChartError."""
    texts = _rendered(json.dumps([str(CHART), values, {"name": release, "namespace": namespace}]))
    manifests = (text for path, text in texts.items() if path.endswith(".yaml"))
    return [one for text in manifests for one in yaml.safe_load_all(text) if one is not None]


@cache
def _rendered(given: str) -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", _HELM], input=given, capture_output=True, text=True, timeout=WAIT_S)
    if done.returncode:
        raise ChartError(done.stderr)
    texts: dict[str, str]
    texts, report = json.loads(done.stdout)
    found = [one["error"] for one in report["messages"] if one["severity"] > 1] + report["errors"]
    if found:
        raise ChartError(str(found))
    return texts


def of_kind(objects: list[Object], kind: str) -> Object:
    (found,) = (one for one in objects if one["kind"] == kind)
    return found


def containers(objects: list[Object]) -> dict[str, Object]:
    """Return the pod's containers by name, in the order in which they start."""
    pod = of_kind(objects, "StatefulSet")["spec"]["template"]["spec"]
    return {one["name"]: one for one in [*pod["initContainers"], *pod["containers"]]}


class Pod:
    """Pod of the StatefulSet, as the kubelet runs it: the same commands, environment, probes and hooks.

    Each mount is a folder; ``address`` stands for the pod's own. ``secrets``: by name and key. ``code``: the files of
    the app's image. Its processes have no capabilities, and for root each container has a PID namespace, unless the
    chart shares one. The rest of a container is left out: its root filesystem and its user. IMMORTAL_IMAGE_BIN names
    the programs of an environment that was made as the image is; default: those of the tests.
    """

    def __init__(
        self,
        objects: list[Object],
        code: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, str]] | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pod-"))  # short: it holds sockets
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._secrets = secrets or {}
        self._address = address
        self._work = self.folder / "app"
        self._work.mkdir()
        self.change(objects, code)

    def change(self, objects: list[Object], code: Mapping[str, str]) -> None:
        """Change what the next start runs; volumes stay."""
        self.spec = of_kind(objects, "StatefulSet")["spec"]["template"]["spec"]
        self.containers = containers(objects)
        for name, text in code.items():
            (self._work / name).write_text(text)
        settings = of_kind(objects, "ConfigMap")["data"]
        self._fill("settings", {name: text.replace("0.0.0.0", self._address) for name, text in settings.items()})
        for volume in self.spec["volumes"]:
            for source in volume.get("projected", {}).get("sources", ()):
                keys = self._secrets[source["secret"]["name"]]
                items = source["secret"].get("items") or [{"key": key, "path": key} for key in keys]
                self._fill(volume["name"], {item["path"]: keys[item["key"]] for item in items})

    @property
    def home(self) -> Path:
        return self._volume("home") / "home"

    def start(self) -> None:
        """Start each container in its turn; return when the app is started."""
        for name, container in self.containers.items():
            is_first = name in (one["name"] for one in self.spec["initContainers"])
            if is_first and container.get("restartPolicy") != "Always":
                done = self.exec(name, *container["command"], *container.get("args", ()))
                assert done.returncode == 0, done.stderr
            else:
                self.start_container(name)

    def start_container(self, name: str) -> None:
        """Start a container, also after it has ended. A sidecar is started when its startup probe has passed."""
        container = self.containers[name]
        argv = self._argv(name, *container["command"], *container.get("args", ()))
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                argv, stdout=log, stderr=log, cwd=self._work, env=self._environment(name)
            )
        if "startupProbe" in container:
            wait_for(lambda: self._has_started(name), lambda: self.log(name), WAIT_S)

    def _has_started(self, name: str) -> bool:
        assert self.processes[name].poll() is None, self.log(name)
        return self.probe(name, "startupProbe").returncode == 0

    def exec(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as `kubectl exec`."""
        return subprocess.run(
            self._argv(name, *command),
            cwd=self._work,
            env=self._environment(name),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )

    def probe(self, name: str, probe: str) -> subprocess.CompletedProcess[str]:
        return self.exec(name, *self.containers[name][probe]["exec"]["command"])

    def until_ready(self) -> None:
        def is_ready() -> bool:
            return self.probe("coordinator", "readinessProbe").returncode == 0

        wait_for(is_ready, lambda: self.log("coordinator") + self.log("app"), WAIT_S)

    def kill(self, name: str) -> None:
        os.kill(self._process_id(name), signal.SIGKILL)
        self.processes[name].wait(WAIT_S)

    def _process_id(self, name: str) -> int:
        """Return the ID of the container's first process: `unshare` passes no signal on."""
        own = self.processes[name].pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split() if self.has_namespaces else []
        return int(children[0]) if children else own

    def end(self) -> tuple[subprocess.CompletedProcess[str], dict[str, int]]:
        """End the pod as if deleted; return the result of the app's hook, and the status of each container."""
        hook = self.exec("app", *self.containers["app"]["lifecycle"]["preStop"]["exec"]["command"])
        statuses = {}
        for name in reversed(self.processes):
            process = self.processes[name]
            if process.poll() is None:
                os.kill(self._process_id(name), signal.SIGTERM)
            statuses[name] = process.wait(self.spec["terminationGracePeriodSeconds"])
        return hook, statuses

    def remove(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is None:
                self.kill(name)
        shutil.rmtree(self.folder)

    def log(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def _volume(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def _fill(self, volume: str, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            file = self._volume(volume) / name
            file.unlink(missing_ok=True)
            file.write_text(text)
            file.chmod(0o440)

    def _argv(self, name: str, *command: str) -> list[str]:
        locked = self.containers[name]["securityContext"]
        assert (locked["capabilities"], locked["allowPrivilegeEscalation"]) == ({"drop": ["ALL"]}, False)
        namespace: Sequence[str] = ()
        if self.has_namespaces:
            namespace = OWN_NAMESPACE
            if name in self.processes and self.processes[name].poll() is None:  # in a container that is running
                target = f"--target={self._process_id(name)}"
                namespace = ("nsenter", target, "--pid", "--mount", f"--wd={self._work}")
        return [*namespace, *WITHOUT_CAPABILITIES, *self._own(name, command)]

    @property
    def has_namespaces(self) -> bool:
        return os.geteuid() == 0 and not self.spec["shareProcessNamespace"]

    def _own(self, name: str, texts: Any) -> list[str]:
        """Return ``texts`` of a container, with the folders of its volumes in place of its mount paths."""
        mounts = {one["mountPath"]: self._volume(one["name"]) for one in self.containers[name]["volumeMounts"]}
        places = re.compile("|".join(rf"(?<![\w/]){re.escape(path)}(?![\w])" for path in mounts))
        return [places.sub(lambda found: str(mounts[found[0]]), text) for text in texts]

    def _environment(self, name: str) -> dict[str, str]:
        given = self.containers[name].get("env", [])
        own = dict(zip((one["name"] for one in given), self._own(name, [one["value"] for one in given]), strict=True))
        programs = os.environ.get("IMMORTAL_IMAGE_BIN") or os.path.dirname(sys.executable)
        return {"PATH": f"{programs}:/usr/bin:/bin", "TMPDIR": str(self._volume("tmp")), **own}
