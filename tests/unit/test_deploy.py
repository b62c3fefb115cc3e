"""deploy/: dashboard and alert rules name metrics and labels that there are, in queries that Prometheus reads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.core.notices import Notice
from immortal.coordinator.notices.__main__ import metrics_table, notices

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "alerts.yml"
_METRIC = re.compile(r"\bimmortal_\w+")
_RANGE = re.compile(r"\[\$__rate_interval\]")
_SELECTOR = re.compile(r"\{([^{}]*)\}")
_STANDARD = {"instance_name", "le"}


def metrics() -> dict[str, set[str]]:
    """Each series that is served, with its labels."""
    found: dict[str, set[str]] = {}
    for line in list(metrics_table())[2:]:
        name, kind, labels, _ = (cell.strip() for cell in line.strip("|").split(" | "))
        known = {label.strip() for label in labels.split(",") if label.strip()} | {"instance_name"}
        if kind == "histogram":
            found |= {f"{name}_bucket": known | {"le"}, f"{name}_sum": known, f"{name}_count": known}
        else:
            found[name] = known
    return found


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return read


def queries() -> Iterator[tuple[str, str]]:
    """(where it is, the query)."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    yield from re.findall(r"- alert: (\w+)\n +expr: (.+)\n", RULES.read_text())


def test_each_metric_and_label_that_they_name_exists() -> None:
    known = metrics()
    notice_names = {one.__name__ for one in notices()}
    found = list(queries())
    assert len(found) > 40
    for where, query in found:
        names = _METRIC.findall(query)
        assert names, where
        for name in names:
            assert name in known, f"{where}: {name}"
        labels = set.union(*(known[name] for name in names))
        for selector in _SELECTOR.findall(query):
            for label, value in re.findall(r'(\w+)=~?"([^"]*)"', selector):
                assert label in labels, f"{where}: {label}"
                if label == "notice":
                    assert set(value.split("|")) <= notice_names, f"{where}: {value}"
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert {label.strip() for label in group.split(",")} <= labels | {"le"}, where
    assert issubclass(notices()[0], Notice)


def test_each_metric_of_the_legend_exists() -> None:
    known = metrics()
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            labels = set.union(*(known[name] for name in _METRIC.findall(target["expr"])))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]
    for name, expression, rest in re.findall(r"- alert: (\w+)\n +expr: (.+)\n((?: {8}.*\n)+)", RULES.read_text()):
        labels = set.union(*(known[metric] for metric in _METRIC.findall(expression)))
        assert set(re.findall(r"\$labels\.(\w+)", rest)) <= labels, name


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool here: it is in Debian's package prometheus")
class TestWithPrometheus:
    def test_the_rules_are_read(self) -> None:
        said = promtool("check", "rules", str(RULES))
        assert f"{len(re.findall('- alert:', RULES.read_text()))} rules found" in said

    def test_the_queries_of_the_dashboard_are_read(self, tmp_path: Path) -> None:
        rules = [
            {"record": f"panel:{number}", "expr": _RANGE.sub("[5m]", query).replace("$instance_name", ".*")}
            for number, (_, query) in enumerate(queries())
        ]
        file = tmp_path / "queries.json"  # which is YAML as well
        file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
        promtool("check", "rules", str(file))

    def test_alerts_fire_when_they_should(self, tmp_path: Path) -> None:
        def fires(alert: str, series: str, values: str, at: str, labels: dict[str, str]) -> dict[str, Any]:
            rule = RULES.read_text().split(f"- alert: {alert}\n")[1].split("- alert:")[0]
            severity = re.findall(r"severity: (\w+)", rule)[0]
            return {
                "interval": "1m",
                "input_series": [{"series": series, "values": values}],
                "promql_expr_test": [],
                "alert_rule_test": [
                    {"eval_time": "0m", "alertname": alert, "exp_alerts": []},
                    {
                        "eval_time": at,
                        "alertname": alert,
                        "exp_alerts": [{"exp_labels": {**labels, "severity": severity}}] if labels else [],
                    },
                ],
            }

        shop = {"instance_name": "shop"}
        tests = [
            fires("ImmortalDown", 'immortal_up{instance_name="shop"}', "0x10", "5m", shop),
            fires("ImmortalDown", 'immortal_up{instance_name="shop"}', "1x10", "5m", {}),
            fires("ImmortalLogFull", 'immortal_log_full{instance_name="shop"}', "0 1x5", "3m", shop),
            fires(
                "ImmortalStreamStopped",
                'immortal_notices_total{instance_name="shop",notice="PeerRefused",level="error"}',
                "0 0 1x9", "5m", {**shop, "notice": "PeerRefused", "level": "error"},
            ),
            fires(
                "ImmortalHeldUp", 'immortal_held_up{instance_name="shop",peer="till"}', "0 1x9", "9m",
                {**shop, "peer": "till"},
            ),
            fires("ImmortalMessageEndsApp", 'immortal_suspect_runs{instance_name="shop"}', "0 1x9", "5m", {}),
            fires("ImmortalHandlerHangs", 'immortal_handling_seconds{instance_name="shop"}', "0 61x5", "3m", shop),
            fires(
                "ImmortalTakenOver", 'immortal_notices_total{instance_name="shop",notice="TakingOver"}',
                "_ 1x30", "5m", {**shop, "notice": "TakingOver"},
            ),
            fires(
                "ImmortalTakenOver", 'immortal_notices_total{instance_name="shop",notice="TakingOver"}',
                "_ 1x30", "25m", {},
            ),
            fires(
                "ImmortalDiverged", 'immortal_notices_total{instance_name="shop",notice="Diverged"}',
                "0 0 1x9", "5m", {**shop, "notice": "Diverged"},
            ),
            fires(
                "ImmortalCallsRefused", 'immortal_refused_calls_total{instance_name="shop",caller="web"}',
                "_ _ 1x30", "5m", {**shop, "caller": "web"},
            ),
            fires(
                "ImmortalCallsRefused", 'immortal_refused_calls_total{instance_name="shop",caller="web"}',
                "_ _ 1x30", "25m", {},
            ),
        ]  # fmt: skip
        (tmp_path / "alerts.yml").write_text(_without_annotations(RULES.read_text()))
        file = tmp_path / "tests.json"
        file.write_text(json.dumps({"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}))
        promtool("test", "rules", str(file))


def _without_annotations(rules: str) -> str:
    """What they say is no part of the tests."""
    return re.sub(r" {8}annotations:\n(?: {10}.*\n)+", "", rules)


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
