"""The guide's steps for CI, on a small fleet: a sample is made, its job passes, and fails with other code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from immortal.coordinator.instances.registry import Registry
from tests.scenarios.test_what_if_fleet_cli import TWICE, folder

__all__ = ["folder"]  # a fixture
GUIDE = (Path(__file__).parents[2] / "docs/how-to/what-if.md").read_text().partition("\n## A small fleet for CI\n")[2]
FILES = re.findall(r"```python\n# ([\w/]+\.py)\n(.*?)```", GUIDE, re.DOTALL)
SAMPLE = re.findall(r"^\$ (immortal sample .*)$", GUIDE, re.MULTILINE)
STEPS = re.findall(r"^ +- run: (.*)$", GUIDE, re.MULTILINE)
VARIABLES = dict(re.findall(r"^ +(PYTHON\w+): \"(.*)\"$", GUIDE, re.MULTILINE))


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **VARIABLES, "PATH": path, "IMMORTAL_HOME": "home"}
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_job_passes_on_a_sample_and_fails_with_other_code(folder: Path) -> None:
    for name, text in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (command,) = (one.replace("1% --key customer", "99.99% --key item") for one in SAMPLE)  # here are no customers
    made = run(command, folder)
    assert made.returncode == 0, made.stderr
    assert re.search(r"^shop +6 +6 ", made.stdout, re.MULTILINE), made.stdout
    assert "unchanged with the present code" in made.stdout
    shutil.rmtree(folder / "home")  # the job has the sample alone
    shutil.rmtree(folder / "logs")
    install, test = STEPS
    assert install.startswith("python -m pip install")  # which is done here
    passed = run(test, folder)
    assert passed.returncode == 0, passed.stdout
    module = folder / f"{str(Registry(folder / 'tests/golden').load('shop').app).partition(':')[0]}.py"
    module.write_text(module.read_text().replace(*TWICE))
    failed = run(test, folder)
    assert failed.returncode == 1
    assert "sold['tea']: was 15; would be 20" in failed.stdout
