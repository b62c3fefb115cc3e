"""Prometheus' server, with this project's rules, which fire at once: their ``for`` is 0 s."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from immortal.coordinator.instances.registry import free_port
from tests.helpers.cli import wait_until

SERVER = shutil.which("prometheus")
RULES = Path(__file__).parents[2] / "deploy" / "alerts.yml"
CONFIGURATION = """
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
rule_files: [alerts.yml]
scrape_configs: [{job_name: immortal, file_sd_configs: [{files: [targets.json]}]}]
"""


class Prometheus:
    """Server that runs until :meth:`close`; its files are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        assert SERVER is not None
        self._folder = folder
        self._targets: list[str] = []
        (folder / "prometheus.yml").write_text(CONFIGURATION)
        (folder / "alerts.yml").write_text(re.sub(r"\bfor: \w+", "for: 0s", RULES.read_text()))
        self._url = f"127.0.0.1:{free_port(('127.0.0.1',), set())}"
        self.scrape()
        with (folder / "output").open("w") as output:
            self._process = subprocess.Popen(
                [SERVER, "--config.file=prometheus.yml", f"--web.listen-address={self._url}"],
                cwd=folder,  # its data is there, too
                stdout=output,
                stderr=output,
            )

    def scrape(self, *addresses: str) -> None:
        """Scrape these addresses, too, from now on."""
        self._targets += addresses
        written = self._folder / "written"
        written.write_text(json.dumps([{"targets": self._targets}]))
        written.rename(self._folder / "targets.json")

    def wait(self, alert: str, instance: str) -> None:
        """Wait until the alert fires for this instance."""
        wanted = {"alertname": alert, "instance_name": instance}.items()
        wait_until(
            lambda: any(wanted <= one["labels"].items() for one in self._ask("alerts") if one["state"] == "firing")
        )

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules, once each was evaluated."""
        found: list[dict[str, Any]] = []

        def evaluated() -> bool:
            found[:] = [rule for group in self._ask("rules") for rule in group["rules"]]
            return bool(found) and all(rule["health"] != "unknown" for rule in found)

        wait_until(evaluated)
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _ask(self, what: str) -> list[Any]:
        """Return what its API lists; [] while it starts."""
        assert self._process.poll() is None, (self._folder / "output").read_text()
        try:
            with urllib.request.urlopen(f"http://{self._url}/api/v1/{what}", timeout=10) as answer:
                return json.load(answer)["data"]["alerts" if what == "alerts" else "groups"]
        except OSError:
            return []
