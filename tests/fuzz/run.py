"""Fuzz with atheris (libFuzzer, guided by the coverage of our modules): scripts/fuzz.

Each target has its share of the time, in a process of its own that begins with the kept corpus and the seeds. Of what
was found, the inputs that reach new lines stay in tests/fuzz/corpus/TARGET. An input that shows a defect is kept there
as well, as defect-*: the test that replays the corpus fails until it is mended.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
ROOT = Path(__file__).parents[2]
INPUT_SIZE_BYTES_MAX = 2048
WATCHED = tuple(str(ROOT / "immortal" / folder) + "/" for folder in ("protocol", "coordinator"))


def corpus_of(name: str) -> list[Path]:
    """The kept inputs of a target, smallest first."""
    return sorted((CORPUS / name).glob("*"), key=lambda path: (path.stat().st_size, path.name))


def fuzz(name: str, found: Path, seconds: int) -> None:
    """Fuzz one target in this process, until libFuzzer ends it; new inputs go to ``found``.

    Our modules are instrumented as they are imported: none may have been before.
    """
    import atheris

    with atheris.instrument_imports(include=["immortal.protocol", "immortal.coordinator"]):
        from tests.fuzz.targets import TARGETS
    from tests.fuzz.seeds import SEEDS

    for index, seed in enumerate(SEEDS[name]):
        (found / f"seed-{index}").write_bytes(seed)
    folders = [str(found)] + ([str(CORPUS / name)] if (CORPUS / name).is_dir() else [])
    options = [f"-max_total_time={seconds}", f"-max_len={INPUT_SIZE_BYTES_MAX}", "-timeout=20", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={found}/defect-", *folders], TARGETS[name])
    atheris.Fuzz()


def reached(name: str, data: bytes) -> set[tuple[str, int, int]]:
    """The steps from line to line that an input takes in our modules."""
    from tests.fuzz.targets import TARGETS

    steps: set[tuple[str, int, int]] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(WATCHED):
            return None
        last = frame.f_code.co_firstlineno

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            steps.add((file, last, frame.f_lineno))
            last = frame.f_lineno
            return step

        return step

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        TARGETS[name](data)
    finally:
        sys.settrace(before)
    return steps


def keep(name: str, found: Path) -> tuple[int, int]:
    """Add to the corpus what reaches more than the corpus and the seeds do; (inputs kept, defects)."""
    from tests.fuzz.seeds import SEEDS

    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    known: set[tuple[str, int, int]] = set()
    for data in [*SEEDS[name], *(path.read_bytes() for path in corpus_of(name) if not path.name.startswith("defect-"))]:
        known |= reached(name, data)
    kept = defects = 0
    for path in sorted(found.iterdir(), key=lambda path: path.stat().st_size):
        data = path.read_bytes()
        key = hashlib.sha256(data).hexdigest()[:16]
        try:
            steps = reached(name, data)
        except Exception:
            (folder / f"defect-{key}").write_bytes(data)
            defects += 1
            continue
        if not steps <= known:
            known |= steps
            (folder / key).write_bytes(data)
            kept += 1
    return kept, defects


def main() -> int:
    if sys.argv[1:2] == ["--here"]:
        name, found, seconds = sys.argv[2:]
        fuzz(name, Path(found), int(seconds))
        return 0
    from tests import proof
    from tests.fuzz.seeds import SEEDS

    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(SEEDS)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together (default: 10)")
    proof.add_option(parser)
    options = parser.parse_args()
    unknown = [name for name in options.targets if name not in SEEDS]
    if unknown:
        parser.error(f"there is no target {unknown[0]!r}; known: {', '.join(SEEDS)}")
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}; a positive number was expected")
    recorder = proof.Recorder(is_on=options.record)
    names = options.targets or list(SEEDS)
    share_s = max(1, round(options.minutes * 60 / len(names)))
    command = " ".join(["scripts/fuzz", f"--minutes {options.minutes:g}", *options.targets])
    defects = inputs = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.fuzz.run", "--here", name, folder, str(share_s)]
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            kept, wrong = keep(name, Path(folder))
        defects += wrong
        runs = [line.split()[-1] for line in ended.stderr.splitlines() if "number_of_executed_units" in line]
        if ended.returncode and not wrong:
            print(ended.stderr, file=sys.stderr)
            print(f"error: fuzzing {name} ended with status {ended.returncode}", file=sys.stderr)
            return recorder.end("fuzzing", command, 1, {"inputs": inputs})
        inputs += int(runs[0]) if runs else 0
        total = len(corpus_of(name))
        verdict = f"{wrong} show a defect" if wrong else "no defect"
        count = runs[0] if runs else "unknown"
        print(f"{name}: {count} runs in {share_s} s; {kept} inputs kept, {total} in all; {verdict}", flush=True)
    counts = {"inputs": inputs, "targets": len(names), "defects": defects}
    return recorder.end("fuzzing", command, 3 if defects else 0, counts)


if __name__ == "__main__":
    sys.exit(main())
