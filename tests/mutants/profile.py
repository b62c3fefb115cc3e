"""Run test files and the simulation as the code is, and note which functions of a folder each has run.

python -m tests.mutants.profile REACH.json FOLDER FILE...
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

from tests.mutants.rooms import PACKAGE, PYTEST, SIMULATION, SIMULATION_SEEDS_PROFILED


class Profile:
    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.codes: defaultdict[str, dict[int, CodeType]] = defaultdict(dict)
        self._seen: dict[int, CodeType] = {}

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._seen[id(frame.f_code)] = frame.f_code

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        file = item.nodeid.partition("::")[0]
        self._seen = self.codes[file]
        begun_s = time.process_time()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self.seconds[file] += time.process_time() - begun_s

    def simulate(self) -> None:
        from tests.simulation import run

        self._seen = self.codes[SIMULATION]
        sys.setprofile(self._note)
        try:
            run.run_share(range(SIMULATION_SEEDS_PROFILED))
        finally:
            sys.setprofile(None)

    def functions(self, folder: str) -> dict[str, list[tuple[str, str]]]:
        """By what has run them."""
        beginning = f"{PACKAGE / folder}/"
        return {
            file: sorted(
                {
                    (str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname.replace(".<locals>", ""))
                    for code in codes.values()
                    if code.co_filename.startswith(beginning)
                }
            )
            for file, codes in self.codes.items()
        }


def main(target: str, folder: str, *files: str) -> int:
    profile = Profile()
    status = int(pytest.main([*PYTEST[2:], *files], plugins=[profile]))
    if status == 0:
        profile.simulate()
        Path(target).write_text(json.dumps({"seconds": profile.seconds, "functions": profile.functions(folder)}))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
