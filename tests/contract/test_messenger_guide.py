"""The guide of the messenger: the examples that it names run; its numbers are those of the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from immortal.coordinator.messenger import limits
from immortal.coordinator.messenger.outbox import RetryPolicy

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "patterns" / "messenger.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "tests" / "requirements" / "messenger.md").read_text(encoding="utf-8")
OUTPUTS = {
    "conversation": "3 seats for 90, 2 left; as you like; 1 seats for 30, 1 left\n",
    "two_loops": "the replica has 1000 records, the last is x=1000 y=3000\nthe model expects 6000 at 2000\n",
    "own_loop": "TO BE OR NOT\n",
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_guide_names_the_examples_and_they_run(name: str) -> None:
    program = ROOT / "examples" / "messenger" / f"{name}.py"
    assert f"(../../examples/messenger/{name}.py)" in GUIDE
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, OUTPUTS[name], "")


def test_the_guide_has_all_programs() -> None:
    assert set(re.findall(r"examples/messenger/(\w+)\.py", GUIDE)) == set(OUTPUTS)


def test_the_numbers_of_the_guide() -> None:
    said = {
        f"{limits.IN_FLIGHT_MAX} messages or {limits.IN_FLIGHT_SIZE_BYTES_MAX >> 20} MiB",
        f"| {limits.PENDING_MAX:,} messages or {limits.PENDING_SIZE_BYTES_MAX >> 20} MiB, or one message |",
        f"callbacks that one link was given and has not used | {limits.CALLBACKS_MAX} |",
        f"when {limits.CALLBACKS_MAX} newer ones were given",
        f"one integer of {limits.SPAN_MAX} bits at most",
        f"| a part | {limits.PART_SIZE_BYTES_MAX >> 20} MiB |",
        f"| parts of a message | {limits.PARTS_MAX - 1} |",
        f"| a reply, all its parts | {limits.REPLY_SIZE_BYTES_MAX >> 20} MiB |",
        f"| {limits.LINKS_MAX}, of one key {limits.PEER_LINKS_MAX} |",
        f"| {limits.PEER_REPLIES_SIZE_BYTES_MAX >> 20} MiB | as above |",
        f"| {limits.HANDSHAKE_TIMEOUT_MS // 1000} s, {limits.HANDSHAKE_SIZE_BYTES_MAX >> 10} KiB, "
        f"{limits.HANDSHAKES_MAX} connections |",
        f"| {limits.CLIENT_QUEUED_SIZE_BYTES_MAX >> 20} MiB, or one message |",
        f"{limits.REPLIES_SIZE_BYTES_MAX >> 20} MiB of replies",
        f"within {limits.RECONNECT_MS_MAX} ms",
        f"{limits.KEEPALIVE_S * (limits.KEEPALIVE_COUNT + 1)} s without an",
        f"{limits.SILENCE_NS // 10**9} s in which nothing",
        f"once in {limits.WARNING_INTERVAL_NS // 10**9} s",
        f"{limits.RETRANSMIT_NS_MIN // 10**6} ms later at least, and after {RetryPolicy().delay_ns_min // 10**9} s at "
        f"most; then twice as long each time, at most {RetryPolicy().delay_ns_max // 10**9} s",
    }
    words = " ".join(GUIDE.split())
    assert not {number for number in said if number not in words}


def test_each_statement_of_the_design_has_a_test_that_there_is() -> None:
    named = set(re.findall(r"`(test_\w+)`", DESIGN))
    files = set(re.findall(r"`(tests/[\w/]+\.py)`", DESIGN))
    there = {
        name
        for path in (ROOT / "tests").glob("*/test_*.py")
        if re.search("messenger|window", path.name)
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(named) > 15
    assert not named - there
    assert all((ROOT / file).exists() for file in files)


def test_many_messages_with_forced_retries_are_each_delivered_once() -> None:
    """The measurement of the guide, with fewer messages; its status says whether all were delivered once."""
    command = [sys.executable, "-m", "scripts.benchmarks.messenger"]
    command += ["--messages", "20000", "--cut-every", "250", "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = json.loads(ended.stdout)
    assert figures["delivered_once"] == figures["called_back"] == 20_000
    assert figures["cuts"] >= 5
    assert figures["sent_again"] > 1_000
    assert figures["duplicates_dropped"] > 1_000
    assert figures["replies_kept_max"] <= limits.IN_FLIGHT_MAX
