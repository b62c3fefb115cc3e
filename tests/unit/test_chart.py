"""deploy/chart, rendered by Helm, against the schemas of the Kubernetes API; deploy/Dockerfile, by hadolint."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from immortal.coordinator.config.settings_file import check_settings
from immortal.coordinator.service.runtime import STOP_TIMEOUT_S
from tests.helpers.chart import CHART, DEPLOY, ChartError, Object, containers, of_kind, render

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="there are no schemas: kubernetes-validate")
pytest.importorskip("helm_python", reason="there is no Helm for this machine: helm-python-sdk renders the chart")

ROOT = DEPLOY.parent
APP: Object = {"app": {"class": "shop:Shop"}}
POSTGRESQL: Object = {"postgresql": "postgresql://immortal@db.example/immortal", "passwordSecret": "password"}
EVERYTHING: Object = {
    "app": {
        "class": "shop:Shop",
        "image": {"repository": "registry.example/shop", "tag": "7"},
        "env": [{"name": "GREETING", "value": "hello"}],
        "envFrom": [{"secretRef": {"name": "bank"}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    },
    "imagePullSecrets": [{"name": "registry"}],
    "coordinator": {"args": ["--promote"]},
    "keysSecret": "keys",
    "settings": "keep_checkpoints = 'all'\n\n[allow]\ntill = ['sell']\n",
    "log": {"volume": {"storageClass": "fast", "size": "1Gi", "accessMode": "ReadWriteOnce"}},
    "metrics": {"tokenSecret": "token", "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "networkPolicy": {
        "clients": [{"podSelector": {"matchLabels": {"app": "web"}}}],
        "metrics": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 443}]}],
    },
    "volumes": [{"name": "cache", "emptyDir": {}}],
    "podAnnotations": {"a.example/b": "c"},
    "podLabels": {"team": "till"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "till", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
}
STANDBYS: Object = APP | {"replicas": 3, "log": POSTGRESQL, "keysSecret": "keys"}
CASES = {"little": APP, "everything": EVERYTHING, "standbys": STANDBYS}
VERSIONS = [one for one in kubernetes_validate.utils.all_versions() if tuple(map(int, one.split("."))) >= (1, 29)]
WITHOUT_SCHEMA = {"ServiceMonitor"}  # of the Prometheus operator, whose schemas no package has


@pytest.fixture(scope="module", params=CASES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(CASES[request.param])


def problem(one: Object, version: str) -> str | None:
    """What the API of ``version`` has against it."""
    try:
        kubernetes_validate.validate(one, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return None


def test_the_api_takes_all_objects(objects: list[Object]) -> None:
    assert len(VERSIONS) >= 5
    for one in objects:
        if one["kind"] not in WITHOUT_SCHEMA:
            assert [problem(one, version) for version in (VERSIONS[0], VERSIONS[-1])] == [None, None], one


def test_the_schemas_find_what_is_wrong() -> None:
    stateful = of_kind(render(APP), "StatefulSet")
    assert problem(stateful, VERSIONS[0]) is None
    for spoil in (
        lambda pod: pod["initContainers"][1].update(restartPolice="Always"),
        lambda pod: pod["containers"][0].update(env=[{"name": "SEED", "value": 0}]),
        lambda pod: pod.update(terminationGracePeriodSeconds="60"),
    ):
        spoiled = copy.deepcopy(stateful)
        spoil(spoiled["spec"]["template"]["spec"])
        assert problem(spoiled, VERSIONS[0]) is not None


def test_each_case_has_its_objects() -> None:
    kinds = {name: sorted(one["kind"] for one in render(values)) for name, values in CASES.items()}
    common = ["ConfigMap", "NetworkPolicy", "Service", "StatefulSet"]
    assert kinds == {
        "little": common,
        "everything": sorted([*common, "ServiceMonitor"]),
        "standbys": sorted([*common, "PodDisruptionBudget"]),
    }


def test_selectors_find_the_pod_and_ports_their_names(objects: list[Object]) -> None:
    stateful = of_kind(objects, "StatefulSet")
    labels = stateful["spec"]["template"]["metadata"]["labels"].items()
    assert stateful["spec"]["selector"]["matchLabels"].items() <= labels
    assert stateful["spec"]["serviceName"] == of_kind(objects, "Service")["metadata"]["name"]
    service = of_kind(objects, "Service")
    assert service["spec"]["selector"].items() <= labels
    policy = of_kind(objects, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels
    (fleet,) = (one["podSelector"]["matchLabels"] for one in policy["ingress"][0]["from"][:1])
    assert fleet.items() <= labels
    named = {port["name"] for port in containers(objects)["coordinator"]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == named
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} <= named
    for one in objects:
        if one["kind"] == "PodDisruptionBudget":
            assert one["spec"]["selector"]["matchLabels"].items() <= labels
        if one["kind"] == "ServiceMonitor":
            assert one["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            assert {endpoint["port"] for endpoint in one["spec"]["endpoints"]} <= {
                port["name"] for port in service["spec"]["ports"]
            }


def test_each_container_is_locked_and_the_coordinator_is_a_sidecar(objects: list[Object]) -> None:
    pod = of_kind(objects, "StatefulSet")["spec"]["template"]["spec"]
    assert list(containers(objects)) == ["prepare", "coordinator", "app"]
    assert [one.get("restartPolicy") for one in pod["initContainers"]] == [None, "Always"]
    for one in containers(objects).values():
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in one["resources"]["limits"]
    assert (pod["securityContext"]["runAsNonRoot"], pod["automountServiceAccountToken"]) == (True, False)
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    declared = {one["name"] for one in pod["volumes"]}
    declared |= {
        one["metadata"]["name"] for one in of_kind(objects, "StatefulSet")["spec"].get("volumeClaimTemplates", ())
    }
    assert {mount["name"] for one in containers(objects).values() for mount in one["volumeMounts"]} == declared


def test_more_options_come_behind_those_of_the_chart() -> None:
    found = {name: containers(render(values))["coordinator"]["args"] for name, values in CASES.items()}
    own = ["--log-format=json", "--log-level=info"]
    assert found == {"little": own, "everything": [*own, "--promote"], "standbys": ["--follow", *own]}


def test_the_app_stops_within_the_time_that_the_pod_has(objects: list[Object]) -> None:
    pod = of_kind(objects, "StatefulSet")["spec"]["template"]["spec"]
    *_, command = containers(objects)["app"]["lifecycle"]["preStop"]["exec"]["command"]
    (timeout_s,) = re.findall(r"^immortal stop counter --timeout-s=(\d+)\b", command)
    assert STOP_TIMEOUT_S < int(timeout_s) < pod["terminationGracePeriodSeconds"]


def test_the_settings_are_some(objects: list[Object]) -> None:
    text = of_kind(objects, "ConfigMap")["data"]["settings.toml"]
    settings = check_settings(tomllib.loads(text), "counter", Path("/home/counter.toml"))
    assert settings.peer == "tcp://0.0.0.0:7400"
    assert settings.peer_template == "tcp://{name}.shop.svc.cluster.local:7400"
    if "allow" in text:
        assert (settings.keep_checkpoints, list(settings.permissions)) == (None, ["till"])


def test_a_log_on_a_volume_has_a_key_unless_the_settings_say_otherwise() -> None:
    def log_key(**values: object) -> object:
        text = of_kind(render(APP | values), "ConfigMap")["data"]["settings.toml"]
        return tomllib.loads(text).get("log_key")

    assert log_key() == "file"
    assert log_key(settings='log_key = "none"') == "none"
    assert log_key(log=POSTGRESQL, keysSecret="keys") is None


def test_other_settings_start_the_pod_anew() -> None:
    def annotations(**values: object) -> Any:
        return of_kind(render(APP | values), "StatefulSet")["spec"]["template"]["metadata"]["annotations"]

    assert annotations(settings="keep_checkpoints = 3") != annotations(settings="keep_checkpoints = 4")
    assert annotations() == annotations(fleet="immortal")


@pytest.mark.parametrize(
    ("values", "release", "said"),
    [
        ({}, "counter", "/app/class"),
        ({"app": {"class": "shop"}}, "counter", "class"),
        (APP | {"replicas": 2}, "counter", r"more than one needs a log that all of them reach: say log\.postgresql"),
        (APP | {"log": POSTGRESQL}, "counter", "keysSecret: with log.postgresql"),
        (APP | {"metrics": {"serviceMonitor": {"enabled": True}}}, "counter", "metrics.tokenSecret: without it"),
        (APP | {"setings": ""}, "counter", "setings"),
        (APP | {"terminationGracePeriodSeconds": 10}, "counter", "terminationGracePeriodSeconds"),
        (APP | {"instance": "Counter"}, "counter", "instance"),
        (APP, "counter.of.words", "can't name an instance here"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: Object, release: str, said: str) -> None:
    with pytest.raises(ChartError, match=said):
        render(values, release=release)


def test_the_schema_knows_each_value() -> None:
    """Those of values.yaml that are documented there, and no others."""
    import yaml

    def compare(values: Object, schema: Object, at: str) -> None:
        assert values.keys() == schema["properties"].keys() - {"global"}, at
        assert schema["additionalProperties"] is False, at
        for key, value in values.items():
            if "properties" in schema["properties"][key]:
                compare(value, schema["properties"][key], f"{at}.{key}")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    compare(values, json.loads((CHART / "values.schema.json").read_text()), "values")


def test_chart_and_package_have_one_version() -> None:
    import yaml

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)


# --- the image -------------------------------------------------------------------------------------------------------


def hadolint(text: str) -> str:
    program = Path(sys.executable).parent / "hadolint"
    if not program.exists():
        pytest.skip("there is no hadolint for this machine")
    done = subprocess.run([program, "-"], input=text, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout


def test_hadolint_has_nothing_against_the_dockerfile() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert hadolint(text) == ""
    assert "DL3008" in hadolint(re.sub("# hadolint ignore.*", "#", text))


def test_the_image_has_the_user_of_the_chart_and_all_that_a_wheel_is_made_of() -> None:
    import yaml

    text = (DEPLOY / "Dockerfile").read_text()
    user = yaml.safe_load((CHART / "values.yaml").read_text())["user"]
    assert f"\nUSER {user}:{user}\n" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extras,) = re.findall(r"immortal-services\[(.*)\]", text)
    needed = project["project"]["dependencies"]
    for extra in extras.split(","):
        needed = [*needed, *project["project"]["optional-dependencies"][extra]]
    locked = (DEPLOY / "requirements.lock").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==([^ ]+)[^\\]* \\\n    --hash=sha256:[0-9a-f]{64}", locked, re.MULTILINE))
    for one in map(Requirement, needed):
        assert pinned.get(canonicalize_name(one.name), "none") in one.specifier, f"{one}: run scripts/lock"
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    sent = re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    files = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml", "setup.py"}
    assert packages == ["immortal*"]
    rooms = {path.name for path in (ROOT / "immortal").iterdir() if path.is_symlink()}
    assert set(sent) == {"immortal", "src", "deploy/requirements.lock", *rooms} | files
