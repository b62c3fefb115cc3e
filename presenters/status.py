"""Status of instances as plain values, the problems it shows, and ages as text."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.core.interfaces import IMPULSES, ONESELF, LogSummary
from immortal.coordinator.core.life_cycle.session import WORKS, Phase
from immortal.coordinator.instances import own_logs, upgrade_mark
from immortal.coordinator.instances.registry import PUBLIC_KEYS_FILE_NAME, Registry
from immortal.coordinator.log.open import log_exists, place_of
from immortal.coordinator.operator import control
from immortal.coordinator.project import run_lock
from immortal.presenters.operations import format_caller, format_waits, with_times
from immortal.protocol.command_line import counted, size_text
from immortal.protocol.errors import ImmortalError

Values = dict[str, Any]


NOT_STARTED = "not started yet"
STOPPED = "stopped"
STARTING = "starting"
UNKNOWN = "unknown"
RUNNING = "running"
FAILED = "failed"
READY = frozenset(phase.value for phase in WORKS | {Phase.FOLLOWING})
KEPT = (STARTING, "restarting", FAILED)  # states that only the process of the project knows
_VERDICTS = {"kept": " (their earlier changes are kept)"}
_STATES = {"normal": RUNNING, "taking a checkpoint": RUNNING}


APP_TIMEOUT_S = 2.0


def instance_status(registry: Registry, name: str, stopped: Values | None = None) -> dict[str, Any]:
    """Return the status of an instance: from its process, else from its log, else an "error".

    "state" is its state as a text to show. ``stopped``: the result of :func:`stopped_status`, if it is known.
    """
    try:
        settings = registry.load(name)
        row = _live_status(settings) or stopped or stopped_status(settings)
        row = row | _supervisor(settings, row) | _upgrade(settings) | _keys(settings.folder)
    except (ImmortalError, OSError) as error:  # another user's, say
        row = {"name": name, "phase": UNKNOWN, "error": str(error)}
    return row | {"state": _STATES.get(row["phase"], row["phase"])}


def _live_status(settings: InstanceSettings) -> dict[str, Any] | None:
    found = control.running(settings.folder)
    if found is None:
        return None
    try:
        row = {"pid": found.pid, **control.query(settings.folder, "status")}
    except control.NotRunningError:
        return None  # the instance stopped just now
    return row | ({} if row.get("app_silent_s") else waits(settings))


def waits(settings: InstanceSettings) -> dict[str, Any]:
    """Ask the app which handlers wait, and for which members its ordered multicasts do; {} if it does not answer."""
    try:
        answer = control.query(settings.folder, "handlers", APP_TIMEOUT_S)
    except (ImmortalError, OSError):
        return {}
    multicasts = [with_times(one) for one in answer.get("multicasts") or ()]
    row: dict[str, Any] = {"multicasts": multicasts} if multicasts else {}
    if handlers := answer.get("handlers"):
        oldest = min(handlers, key=lambda one: one["since_ns"])
        found = {"task": oldest["id"], "handler": oldest["handler"], "since_ns": oldest["since_ns"]}
        row["waiting"] = {"count": answer["count"], "oldest": found}
    return row


def _supervisor(settings: InstanceSettings, row: dict[str, Any]) -> dict[str, Any]:
    """Return the status fields of `immortal run`, if it runs, else of the project's process.
    Between two starts, only `immortal run` runs."""
    found = control.supervisor(settings.folder)
    if found is not None:
        return {"supervisor_pid": found.pid} | ({} if "pid" in row else {"phase": STARTING})
    keeper = None if "pid" in row else run_lock.holder(settings.folder.parent)
    known = "" if keeper is None else keeper.states.get(settings.name, "")
    return {"phase": known} if known.startswith(KEPT) else {}


def _upgrade(settings: InstanceSettings) -> dict[str, Any]:
    mark = upgrade_mark.read(settings.folder)
    if mark is None:
        return {}
    return {"upgrade_to": mark.to} if mark.pending else {"upgrade_to": mark.to, "upgrade_problem": mark.problem}


def stopped_status(settings: InstanceSettings) -> dict[str, Any]:
    """Return the status fields of a stopped instance, read from its log. Raises LogError."""
    if not log_exists(settings.log):
        lost = f"its log is missing from {settings.log}: bring it back ('immortal doctor {settings.name}')"
        return {"name": settings.name, "phase": NOT_STARTED} | (
            {"problems": [lost]} if own_logs.had_log(settings) else {}
        )
    with own_logs.open_reader(settings) as reader:
        summary = reader.summary()
        problems = list(reader.problems)
    place = place_of(settings.log)
    holder = place.holder() if place.is_shared else None
    sources = dict(summary.sources)
    impulses = sources.pop(IMPULSES, None)

    def named(peer: str) -> str:
        return settings.name if peer == ONESELF else peer

    row: dict[str, Any] = {
        "name": settings.name,
        "phase": STOPPED if holder is None else f"at {holder}",
        "committer_id": summary.committer_id,
        "epoch": summary.epoch,
        "sequence_id": summary.last_sequence_id,
        "version": summary.versions[-1].version if summary.versions else None,
        "checkpoint": None,
        "inputs": {named(source): {"position": one.position} for source, one in sources.items()},
        "outputs": {named(to): {"acknowledged": position} for to, position in summary.acknowledged.items()},
    }
    if ONESELF in sources:  # its receiver is this log
        row["outputs"][settings.name] = {"acknowledged": sources[ONESELF].position}
    if impulses is not None:
        row["impulses"] = impulses.position  # the count of impulses so far
    if summary.checkpoints:
        newest = summary.checkpoints[-1]
        row["checkpoint"] = {
            "id": newest.checkpoint_id,
            "sequence_id": newest.sequence_id,
            "size_bytes": newest.size_bytes,
            "age_s": round(max(0.0, time.time() - newest.time_ns / 1e9), 3),
        }
        for to, mark in newest.outputs.items():
            row["outputs"].setdefault(named(to), {})["position_at_checkpoint"] = mark.position
    if problems:
        row["problems"] = problems
    return row | _failures(summary)


def _failures(summary: LogSummary) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if summary.verdicts:
        row["verdicts"] = dict(Counter(one.kind.name.lower() for one in summary.verdicts))
    if summary.letters:
        row["letters"] = {"count": len(summary.letters), "bytes": sum(summary.letters.values())}
    if summary.suspect.runs_count:
        one = summary.suspect
        record, message = (None if number < 0 else number for number in (one.sequence_id, one.message_index))
        row["suspect"] = {"record": record, "message": message, "runs": one.runs_count}
    return row


def problems(row: dict[str, Any]) -> list[str]:
    """Return the problems in an instance's status as texts, each with the instance's name and a known remedy."""
    name, outputs = row["name"], row.get("outputs", {})
    found = [f"{name}: {problem}" for problem in (*row.get("problems", ()), *_problems(row, name), *_failed(row))]
    found += [f"{name} to {to}: {one['error']}" for to, one in outputs.items() if one.get("error")]
    return found + ([f"{name}: {row['error']}"] if "error" in row else [])


def _problems(row: dict[str, Any], name: str) -> Iterator[str]:
    if row.get("held_up_for"):
        limits = "peer_buffer_mib_max and spill_limit_mb"
        yield f"its app is held up: too much output waits for {', '.join(row['held_up_for'])} ({limits})"
    if paused := row.get("paused"):
        yield f"paused by {_pause_text(paused)}; incoming messages are logged and wait ('immortal resume {name}')"
    yield from map(format_waits, row.get("multicasts", ()))
    if unsaved := format_unsaved(row):
        yield unsaved
    if (row.get("log") or {}).get("full"):
        yield f"input from peers and impulses are held back: {row['log']['full']}"
    if row.get("log_silent_s") is not None:
        yield f"the log has not answered for {age_text(row['log_silent_s'])}, trying again"
    clock = row.get("clock") or {}
    if clock.get("ahead_s"):
        yield f"{clock_problem(clock)} ('immortal clock {name}')"
    brought = row.get("app_version")
    if brought not in (None, row.get("version")) and row.get("upgrade_to") is None and row.get("version") is not None:
        yield (
            f"it runs version {row['version']}, but its class has version {brought}: to upgrade it, use 'immortal up"
            f" --upgrade' in a project, or 'immortal upgrade {name} --to {brought}' and a restart"
        )
    if row.get("upgrade_problem"):
        failed = f"the upgrade to version {row['upgrade_to']} failed: {row['upgrade_problem']}"
        yield f"{failed} ('immortal upgrade {name} --cancel' forgets it)"
    yield from row.get("key_reminders", ())


def format_unsaved(row: dict[str, Any]) -> str:
    """Format the reason why there are no checkpoints, the cost and the remedies; "" if there are checkpoints."""
    unsaved = row.get("unsaved")
    if not unsaved:
        return ""
    since = f"for {age_text(unsaved['for_s'])}, its state can't be saved: {unsaved['since']}"
    return f"no checkpoints {since}; {unsaved['costs']}. To fix it: {unsaved['ways_out']}"


def clock_problem(clock: dict[str, Any]) -> str:
    """Format the difference between the machine's clock and the instance's time, and how the instance handles it."""
    ahead_s = clock["ahead_s"]
    way = f"{age_text(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} the instance's time"
    if clock.get("slowed"):
        return f"the machine's clock is {way}, which runs 5 % slower until both agree"
    left_s = max(0.0, clock["hold_s"] - clock["held_s"])
    return f"the machine's clock is {way}, and not trusted for another {age_text(left_s)}"


def _failed(row: dict[str, Any]) -> Iterator[str]:
    """Yield texts of handlers that run for long, suspects of crashes, and counts of failed calls."""
    handling, suspect = row.get("handling"), row.get("suspect")
    letters, verdicts = row.get("letters") or {}, row.get("verdicts") or {}
    if handling:
        by = "" if handling.get("caller") is None else f", called by {format_caller(handling)}"
        what = handling.get("method") or "a message"
        yield f"handling {what} for {handling.get('for_s', 0):.0f} s, record {handling.get('record')}{by}"
    if suspect:
        yield f"its app has ended without an error message {_times(suspect['runs'])}{_place(suspect)}"
    for caller, deaths in (row.get("deaths_caused") or {}).items():
        yield f"calls of {caller} have ended its app {'once' if deaths == 1 else f'{deaths} times'}"
    if nested := row.get("nested"):
        senders = ", ".join(f"{count} of {caller}" for caller, count in nested.items())
        yield f"messages refused because they are nested too deeply: {senders}"
    failed = {kind: count for kind, count in verdicts.items() if isinstance(count, int) and count}
    if failed:
        counts = ", ".join(f"{count} {kind}{_VERDICTS.get(kind, '')}" for kind, count in failed.items())
        yield f"calls that failed: {counts}; the app's output has each, and why"
    if letters.get("count"):
        size, dropped = size_text(letters.get("bytes", 0)), letters.get("lost")
        more = f"; dropped for lack of room: {dropped}" if dropped else ""
        count = counted(letters["count"], "dead letter")
        yield f"{count}, {size}{more} ('immortal dead-letters {row['name']}' shows them)"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times in a row"


def _place(suspect: dict[str, Any]) -> str:
    record, message = suspect["record"], suspect["message"]
    return ("" if record is None else f", at record {record}") + ("" if message is None else f", message {message}")


def age_text(age_s: float) -> str:
    """Format an age in its largest unit: "3 d", "4 h", "5 min", "6 s"."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{age_s:.0f} s"


def duration_text(duration_ns: int) -> str:
    """Format a duration: "340 µs", "12 ms", "3.4 s"."""
    if duration_ns < 1_000_000:
        return f"{duration_ns / 1e3:.0f} µs"
    if duration_ns < 1_000_000_000:
        return f"{duration_ns / 1e6:.1f} ms"
    return f"{duration_ns / 1e9:.2f} s"


def rate_text(rate: float | None) -> str:
    """Format a number per second: "0", "0.4", "1,200"; "" if it is not known."""
    return "" if rate is None else "0" if not rate else f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def format_paused(answer: Values) -> str:
    """Format the result of a pause."""
    if answer["changed"]:
        return "paused; incoming messages are logged, and wait until it is resumed"
    return f"it is paused already, by {_pause_text(answer['paused'])}"


def format_resumed(answer: Values) -> str:
    """Format the result of a resume."""
    if answer["changed"]:
        return f"resumed; it was paused by {_pause_text(answer['paused'])}"
    return "it was not paused: there is nothing to resume"


def _pause_text(paused: Values) -> str:
    return f"{paused['by']} since {time_text(paused['since_ns'])}"


def _keys(folder: Path) -> dict[str, Any]:
    if not (folder / PUBLIC_KEYS_FILE_NAME).exists():
        return {}
    from immortal.coordinator.peers import keys  # needs ZeroMQ, whose loading takes long

    try:
        file = keys.read_public_file(folder)
    except keys.KeysError as error:
        return {"key_reminders": [str(error)]}
    found = list(keys.reminders(file, keys.today(), keys.AGE_DAYS_MAX, keys.SOON_DAYS))
    return {"key_reminders": found} if found else {}


def operator_name() -> str:
    """Return the name of the user who runs this command, for the audit log."""
    import pwd

    try:
        login = os.getlogin()
    except OSError:  # no terminal
        try:
            login = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            login = "somebody"
    return f"{login} (uid {os.getuid()}, process {os.getpid()})"
