"""Java is found, or it is said what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from immortal.pipeline import java
from immortal.pipeline.errors import JavaError


def fake_java(folder: Path, answer: str, status: int = 0) -> Path:
    """A Java in ``folder`` that says which version it is, as the real one does: on stderr."""
    executable = folder / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho '{answer}' >&2\nexit {status}\n")
    executable.chmod(0o755)
    return folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.setattr(java, "_USUAL_PLACE", tmp_path / "jvm")
    return tmp_path


def test_no_java_at_all(machine: Path) -> None:
    with pytest.raises(JavaError, match=r"^Spark needs Java 17 or newer, there is none; on Debian: apt-get install"):
        java.find_java()


@pytest.mark.parametrize("answer", ['java version "1.8.0_392"', 'openjdk version "11.0.21" 2023-10-17'])
def test_java_too_old(machine: Path, answer: str) -> None:
    fake_java(machine / "path", answer)
    version = 8 if "1.8" in answer else 11
    with pytest.raises(JavaError, match=f"here is Java {version};"):
        java.find_java()


def test_java_on_the_path(machine: Path) -> None:
    fake_java(machine / "path", 'openjdk version "21" 2023-09-19')
    assert java.find_java() == java.Java(None, 21)


def test_another_java_where_the_one_on_the_path_is_too_old(machine: Path) -> None:
    fake_java(machine / "path", 'openjdk version "11.0.21"')
    newer = fake_java(machine / "jvm" / "java-17", 'openjdk version "17.0.9"')
    assert java.find_java() == java.Java(newer, 17)


def test_a_java_home_that_is_set_is_the_only_one(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(machine / "path", 'openjdk version "17.0.9"')
    home = fake_java(machine / "old", 'openjdk version "11.0.21"')
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(JavaError, match=r"^JAVA_HOME is .*, Java 11: Spark needs Java 17"):
        java.find_java()
    monkeypatch.setenv("JAVA_HOME", str(machine / "nowhere"))
    with pytest.raises(JavaError, match="no Java that runs"):
        java.find_java()


def test_what_does_not_run_is_no_java(machine: Path) -> None:
    fake_java(machine / "path", 'openjdk version "17.0.9"', status=1)
    with pytest.raises(JavaError, match="there is none"):
        java.find_java()
