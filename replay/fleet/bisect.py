"""Bisection of a git range for the first commit whose code gives a fleet another outcome."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from immortal.replay.fleet.outcome import FleetOutcome
from immortal.replay.plan import ReplayError

_OF_ANOTHER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # a hook has these of its own repository


class Commit(Struct):
    """Commit of a git range. ``date``: of its author, as ISO 8601. ``found``: "good", "bad" or "can't be tried"."""

    id: str
    subject: str
    author: str
    date: str
    found: str = ""
    problem: str = ""  # why it can't be tried

    def __str__(self) -> str:
        return f"{self.id[:10]} {self.subject}"


class Bisection(Struct):
    """Result of a bisection. ``first``: the first commit with another outcome, or None. ``outcome``: its what-if.

    ``unknown``: the commits directly before it that can't be tried; one of these may be the first. ``tried``: in order.
    """

    commits: int
    first: Commit | None
    outcome: FleetOutcome | None
    unknown: list[Commit]
    tried: list[Commit]


Trials = Callable[[Sequence[Commit]], Iterable[FleetOutcome | ReplayError]]
"""Function that tries commits: the outcome of each, in order, or why there is none."""


def bisect(
    repository: Path,
    git_range: str,
    trials: Trials,
    is_bad: Callable[[FleetOutcome], bool],
    report: Callable[[Commit], None],
    *,
    at_once: int = 1,
) -> Bisection:
    """Find the first commit of ``git_range`` ("A..B", first parents only) whose outcome ``is_bad``.

    Like ``git bisect`` it assumes that all commits after a bad one are bad. ``trials`` gets ``at_once`` commits.
    ``report`` receives each tried commit. Raises ReplayError for an invalid range, or if A is bad or can't be tried.
    """
    if not repository.is_dir():
        raise ReplayError(f"'{repository}': a folder of a git repository was expected beside a range of commits")
    _top_of(repository)
    base, dots, end = git_range.partition("..")
    if not dots or not base or end.startswith("."):
        raise ReplayError(f"{git_range!r}: a range of commits was expected, such as v1.0..HEAD")
    commits = [_commit(repository, _git(repository, "rev-parse", "--verify", f"{base}^{{commit}}").strip())]
    ids = _git(repository, "rev-list", "--reverse", "--first-parent", git_range).split()
    commits += [_commit(repository, one) for one in ids]
    if not ids:
        raise ReplayError(f"{git_range!r}: there is no commit in it")
    tried: list[Commit] = []
    outcomes: dict[str, FleetOutcome] = {}

    def find(chosen: Sequence[Commit]) -> None:
        for commit, result in zip(chosen, trials(chosen), strict=True):
            if isinstance(result, ReplayError):
                commit.found, commit.problem = "can't be tried", str(result)
            else:
                commit.found, outcomes[commit.id] = "bad" if is_bad(result) else "good", result
            tried.append(commit)
            report(commit)

    ends = [commits[0], commits[-1]]
    find(ends[:at_once])
    if commits[0].found != "good":
        raise ReplayError(f"{commits[0]}, before the range, is {_why(commits[0])}: begin with an earlier commit")
    find([one for one in ends if not one.found])
    low, high = 0, len(commits) - 1  # commits[low] is good, commits[high] is bad
    if commits[high].found == "good":
        return Bisection(len(ids), None, None, [], tried)
    if commits[high].problem:
        raise ReplayError(f"{commits[high]}, the last of the range, is {_why(commits[high])}")
    while left := [one for one in commits[low + 1 : high] if not one.found]:
        chosen = {(len(left) * number - 1) // (at_once + 1) for number in range(1, at_once + 1)}  # evenly among them
        find([left[index] for index in sorted(chosen)])
        high = next(index for index in range(low + 1, high + 1) if commits[index].found == "bad")
        low = max(index for index in range(low, high) if commits[index].found == "good")
    first = commits[high]
    return Bisection(len(ids), first, outcomes[first.id], commits[low + 1 : high], tried)


def _why(commit: Commit) -> str:
    return f"one that {commit.found}: {commit.problem}" if commit.problem else commit.found


def _commit(repository: Path, name: str) -> Commit:
    fields = _git(repository, "show", "--no-patch", "--format=%H%x00%s%x00%an%x00%aI", name).strip().split("\0")
    return Commit(*fields)


def _top_of(repository: Path) -> Path:
    return Path(_git(repository, "rev-parse", "--show-toplevel").strip())


@contextmanager
def files_of(repository: Path, commit: str) -> Iterator[Path]:
    """Check a commit out, and yield the folder that stands for ``repository``, which can be below the top folder."""
    top = _top_of(repository)
    with tempfile.TemporaryDirectory(prefix="immortal-bisect-") as folder:
        files = Path(folder, "files")
        _git(top, "worktree", "add", "--quiet", "--detach", str(files), commit)
        try:
            yield files / repository.resolve().relative_to(top.resolve())
        finally:
            _git(top, "worktree", "remove", "--force", str(files))


def _git(folder: Path, *arguments: str) -> str:
    try:
        command = ["git", "-C", str(folder), *arguments]
        env = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    except FileNotFoundError:
        raise ReplayError("git is not installed: a range of commits needs it") from None
    if done.returncode:
        raise ReplayError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout
