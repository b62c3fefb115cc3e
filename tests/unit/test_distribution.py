"""The distribution's name: one for all places that say it, and none of them says another project's."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from immortal.cli import main
from immortal.coordinator.doctor.installation import EXTRAS
from immortal.coordinator.project.project import make_project
from immortal.protocol import distribution
from scripts.release import ReleaseError, notes_of

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
_INSTALLS = re.compile(r"(?:pip install|uv add)[^`\n]*?\b(immortal[\w-]*)(?!.* another project)")


def test_the_project_and_those_that_init_makes_say_it(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == distribution.NAME
    make_project(tmp_path, "shop", "shop")
    made = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert made["dependencies"] == [distribution.NAME]


def test_no_page_and_no_image_installs_another_projects_package() -> None:
    texts = {path: path.read_text() for path in (*PAGES, ROOT / "deploy" / "Dockerfile")}
    found = [(path.name, said) for path, text in texts.items() for said in _INSTALLS.findall(text)]
    assert len(found) > 10
    ours = (distribution.NAME, distribution.NAME.replace("-", "_"))
    assert [one for one in found if not one[1].startswith(ours)] == []


def test_the_page_has_the_extras_that_there_are() -> None:
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    table = page.partition("The extras:\n\n")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^- `([\w-]+)`", table, re.MULTILINE)) == EXTRAS
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == extras.keys() - {"dev", "docs", "rivals"}


def test_a_command_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    python = sys.executable
    assert distribution.add_extra("web") == f"{python} -m pip install 'immortal-services[web]'"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as in an environment that uv made
    assert distribution.add_extra("web") == f"uv pip install --python {python} 'immortal-services[web]'"


@pytest.mark.parametrize(
    ("direct_url", "source"),
    [
        (None, f"immortal-services=={metadata.version(distribution.NAME)}"),
        ('{"url": "file:///a/x.whl", "archive_info": {}}', "file:///a/x.whl"),
        ('{"url": "https://b/c", "vcs_info": {"vcs": "git", "commit_id": "12ab"}}', "git+https://b/c@12ab"),
    ],
)
def test_where_it_came_from(direct_url: str | None, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = metadata.PathDistribution.read_text
    monkeypatch.setattr(
        metadata.PathDistribution,
        "read_text",
        lambda self, name: direct_url if name == "direct_url.json" else read(self, name),
    )
    assert distribution.origin() == source


@pytest.mark.usefixtures("started_anew")
def test_it_refuses_to_run_beside_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "immortal").symlink_to(ROOT / "immortal")
    another = tmp_path / "immortal-0.1.1.dist-info"
    another.mkdir()
    for module in ("immortal", "immortal.appsdk"):
        done = subprocess.run(
            [sys.executable, "-m", module, *(["status"] if module == "immortal" else ["shop:Shop"])],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode != 0
        assert f"immortal-0.1.1 is installed in {tmp_path}: it is another project's package" in done.stderr
        assert f"{sys.executable} -m pip uninstall immortal && " in done.stderr
        assert "Traceback" not in done.stderr
    another.rmdir()
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, ["status"]).exit_code == 0


def test_the_notes_of_a_release_are_its_section() -> None:
    text = "# Changelog\n\n## Unreleased\n{}\n## 0.2.0 - 2026-12-01\n\n### Added\n\n- A.\n\n## 0.1.0 - 2026\n\n- B.\n"
    assert notes_of(text.format(""), "0.2.0", is_draft=False) == "### Added\n\n- A.\n"
    assert notes_of(text.format(""), "0.1.0", is_draft=False) == "- B.\n"
    assert notes_of(text.format("\n- C.\n"), "0.2.0", is_draft=True) == "- C.\n"
    with pytest.raises(ReleaseError, match=r"entries under 'Unreleased': which are of 0\.2\.0\?"):
        notes_of(text.format("\n- C.\n"), "0.2.0", is_draft=False)
    with pytest.raises(ReleaseError, match=r"no section '## 0\.3\.0 - DATE'"):
        notes_of(text.format(""), "0.3.0", is_draft=False)
