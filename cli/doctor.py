"""Command doctor: problems of the installation, the home and its instances."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import click
import msgspec

from immortal.appsdk.calls.user_code import hide_secrets
from immortal.cli.options import complete_instance, instance_name, pass_registry
from immortal.cli.recovery import check_state_is_savable
from immortal.coordinator.config import ConfigError, InstanceSettings
from immortal.coordinator.doctor import Finding, Level, examine, examine_instance
from immortal.coordinator.doctor.finding import Area, note, problem
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.open import log_exists, place_of
from immortal.coordinator.project.output import Tail, merge_by_time
from immortal.presenters.status import instance_status, problems
from immortal.protocol import redaction
from immortal.protocol.command_line import counted, echo, echo_json, json_option
from immortal.protocol.files import removed_on_error
from immortal.replay import app_process
from immortal.replay.plan import ReplayError

BUNDLE_LINES_MAX = 1000
_OF_APP = re.compile(r"\S+ (- |\S+ > )")
_PAYLOAD = re.compile(r"(\b\w+\.\w+\(|\braised \w+: |//[^@/\s]*:(?=[^@/\s]*@)).*")


@click.command()
@click.argument("name", required=False, callback=instance_name, shell_complete=complete_instance)
@json_option
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a zip archive for a bug report: findings, versions, status, settings, last output; no payloads.",
)
@pass_registry
def doctor(registry: Registry, name: str | None, as_json: bool, bundle: Path | None) -> None:
    """Check this installation, the home folder, disks, clock, limits and memory.

    With NAME, check that instance: what the crash of one machine would lose, given the place of its log, and problems
    of its files and disk. Nothing is changed; sync times are measured in a separate file, for a second on each disk.

    Exit status: 0 without a problem (a note does not count), 1 with one.
    """
    if bundle is not None:
        if as_json or bundle.exists():
            wrong = "can't be combined with --json" if as_json else f"{bundle}: the file exists, give a new one"
            raise click.UsageError(f"--bundle {wrong}")
        write_bundle(registry, bundle, None if name is None else [registry.load(name).name])
        return
    if name is not None:
        findings = _instance(registry, name, as_json=as_json)
    else:
        findings = [*examine(registry), *_redaction(registry)]
        if as_json:
            echo_json({"findings": msgspec.to_builtins(findings)})
        else:
            _show(findings)
    sys.exit(any(finding.level is Level.PROBLEM for finding in findings))


def _instance(registry: Registry, name: str, *, as_json: bool) -> list[Finding]:
    settings = registry.load(name)
    place = place_of(settings.log)
    lines, holder = place.durability(), place.holder()
    findings = [*examine_instance(registry, settings), *_state(settings)]
    if "pid" in (row := instance_status(registry, name)):  # _state speaks of what is unsaved
        findings += [note(Area.HOME, text, "", "") for text in problems(row | {"unsaved": None})]
    if as_json:
        shown = msgspec.to_builtins(findings)
        echo_json({"log": place.label, "writer": holder, "crashes": lines, "findings": shown})
        return findings
    echo(f"{name}: its log is in {place.label}, written by {holder or 'nobody now'}")
    for line in lines:
        echo(f"  {line}")
    _show(findings)
    return findings


def write_bundle(registry: Registry, path: Path, names: list[str] | None = None) -> None:
    """Write the parts of the home, or of some instances, that a bug report needs, and list them.

    Left out: logs, checkpoints, keys, and what can hold anybody's data: the output of apps, arguments of calls, texts
    of exceptions.
    """
    files: dict[str, bytes] = {"findings.json": _json(list(examine(registry)))}
    for one in registry.names() if names is None else names:
        files[f"{one}/status.json"] = _json(instance_status(registry, one))
        with contextlib.suppress(ConfigError):  # the findings report it
            files[f"{one}/settings.json"] = _json(registry.load(one))
        lines = [line for _, line in merge_by_time([Tail(registry.home, one)], BUNDLE_LINES_MAX)]
        if lines:
            own = [_shown(line) for line in lines if not _OF_APP.match(line)]
            left_out = f"# {counted(len(lines) - len(own), 'line')} of the app left out"
            files[f"{one}/output.txt"] = "\n".join([*own, left_out, ""]).encode()
    mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with (
        open(os.open(path, mode, 0o600), "wb") as file,
        removed_on_error(path),
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for file_name, content in files.items():
            archive.writestr(f"{path.stem}/{file_name}", content)
    for file_name, content in files.items():
        echo(f"{len(content):>9,} bytes  {file_name}")
    echo(f"{path}: check its content before you send it")


def _json(value: object) -> bytes:
    plain = _shown(msgspec.to_builtins(value, enc_hook=str))
    return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"


def _shown(value: Any) -> Any:
    """Return ``value`` with secrets and payloads hidden in its texts."""
    if isinstance(value, dict):
        return {key: _shown(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(one) for one in value]
    return _PAYLOAD.sub(r"\1***", hide_secrets(value)) if isinstance(value, str) else value


def _redaction(registry: Registry) -> Iterator[Finding]:
    """Check the rules of redaction: those of a handler, parameter or attribute that no class here has."""
    if wrong := redaction.rules().problem:
        yield problem(Area.HOME, wrong, "nothing is shown that a rule could be for", "mend the file")
    elif redaction.rules().rules:
        apps = {app for name in registry.names() if (app := registry.load(name).app)}
        try:
            for rule in redaction.unmatched_rules(chain.from_iterable(map(app_process.class_paths, sorted(apps)))):
                why = "it hides nothing, unless it is for an effect, or for a class of another home"
                text = f"no class has what the rule {rule!r} names"
                yield note(Area.HOME, text, why, f"see {redaction.rules_file()}")
        except ReplayError as error:
            what = "which rules of redaction fit nothing is not known"
            yield note(Area.HOME, what, str(error), "run the doctor where all apps can be imported")


def _state(settings: InstanceSettings) -> Iterator[Finding]:
    if not log_exists(settings.log):
        return
    state = check_state_is_savable(settings)
    if state.divergence:
        yield problem(Area.HOME, state.divergence, "its next start stops there", "run the code that made these calls")
    elif state.problem:
        why = "it works, but takes no checkpoints: its log grows, and its recoveries take longer"
        ways = "'immortal skip' that message (--handled while it is stopped), new code, or a codec for the type"
        yield problem(Area.HOME, f"{settings.name}: {state.problem}", why, ways)
    elif state.note:
        yield note(Area.HOME, f"{settings.name}: {state.note}", "its next checkpoint shows it", "see that message")


def _show(findings: Iterable[Finding]) -> None:
    """Print each finding, its meaning and remedy; at the end the number of findings of each kind."""
    counts = {"problem": 0, "note": 0}
    for finding in findings:
        echo(f"{finding.level:<8} {finding.area:<13} {finding.what}")
        if finding.level in counts:
            counts[finding.level] += 1
        for text in (finding.why, f"do: {finding.remedy}" if finding.remedy else ""):
            if text:
                echo(f"{'':<24}{text}")
    echo(", ".join(counted(count, noun) for noun, count in counts.items()))
