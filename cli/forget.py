"""Command forget: destroys the keys of persons, while all instances are paused.

A recovery must not read a value where the run before read none, or the other way round. So each instance takes a
checkpoint between two inputs, behind which it has handled nothing when the key is destroyed; then its app starts anew
from there, and nothing of the person is left in its memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import click
from msgspec.structs import replace

from immortal.cli.lifecycle import (
    STOP_TIMEOUT_S,
    cannot_restart_text,
    checkpoint_at_stop,
    refuse_unreachable_holder,
    restart_instance,
)
from immortal.cli.operations import take_checkpoint
from immortal.cli.options import ask_coordinator, pass_registry, timeout_option
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.presenters.status import operator_name
from immortal.protocol import personal_keys
from immortal.protocol.command_line import FailedError, echo, echo_json, json_option
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import acquire_lock, describe_lock_holder, open_lock
from immortal.replay.app_process import AppCommand, default_app
from immortal.replay.host import run_replay
from immortal.replay.plan import ReplayPlan
from immortal.replay.result import Sink

_TO_FORGET = ", to forget a person"  # behind the name of who has paused an instance


@click.command()
@click.argument("subjects", nargs=-1, metavar="SUBJECT...")
@click.option("--list", "lists", is_flag=True, help="List forgotten persons, with dates.")
@timeout_option(STOP_TIMEOUT_S, "Seconds to wait for the checkpoint or restart of one instance.")
@json_option
@pass_registry
def forget(registry: Registry, subjects: tuple[str, ...], lists: bool, timeout_s: float, as_json: bool) -> None:
    """Destroy the keys of persons, so that their data in immortal.Personal values is unreadable in every copy.

    SUBJECT is the ID that apps gave to immortal.Personal. All instances of the home pause, take a checkpoint and
    restart. A stopped instance must have a checkpoint of its last record. If the command fails, run it again.
    """
    if bool(subjects) == lists:
        raise click.UsageError("give either the IDs of the persons to forget, or --list")
    if lists:
        everyone = list(personal_keys.all_persons())
        gone = [one for one in everyone if one.forgotten]
        left = [one.subject for one in gone if personal_keys.has_leftover_key(one.subject)]
        if as_json:
            dates = {one.subject: one.forgotten for one in gone}
            echo_json({"forgotten": dates, "known": len(everyone) - len(gone), "left": left})
            return
        for one in sorted(gone, key=lambda one: (one.forgotten, one.subject)):
            is_left = "  (the key is left on the disk: forget again)" if one.subject in left else ""
            echo(f"{one.forgotten}  {one.subject}{is_left}")
        echo(f"{len(gone)} forgotten; {len(everyone) - len(gone)} have a key in {personal_keys.folder()}")
        return
    persons = {subject: personal_keys.find(subject) for subject in dict.fromkeys(subjects)}
    if unknown := [subject for subject, person in persons.items() if person is None]:
        raise FailedError(
            f"{personal_keys.folder()} has no key of {', '.join(map(repr, unknown))}: an ID as apps give it to"
            f" immortal.Personal was expected; {personal_keys.KEYS_VARIABLE} names another folder"
        )
    click.get_current_context().with_resource(_without_others())
    everybody = [registry.load(name) for name in registry.names()]
    todo = [subject for subject, person in persons.items() if person is not None and not person.forgotten]
    restarted = _pause_all(everybody, todo, timeout_s) if todo else list(filter(_is_left_paused, everybody))
    try:
        for subject in persons:  # also of those that are forgotten: a crash can have interrupted it
            personal_keys.destroy(subject, datetime.now(UTC).date().isoformat())
    finally:
        problems = []
        for settings in restarted:
            try:
                echo(restart_instance(settings, timeout_s), err=as_json)
            except ImmortalError as error:
                problems.append(f"{settings.name} must be started again: {error}")
        if problems:
            raise FailedError("; ".join(problems))
    now = {subject: personal_keys.find(subject) for subject in persons}
    dates = {subject: person.forgotten for subject, person in now.items() if person is not None}
    if as_json:
        echo_json({"forgotten": dates, "restarted": [settings.name for settings in restarted]})
        return
    for subject, date in dates.items():
        echo(f"{subject} is forgotten{'' if subject in todo else ' already'}, since {date}")


@contextlib.contextmanager
def _without_others() -> Iterator[None]:
    """Keep other commands from forgetting persons with the same folder of keys. Raises FailedError."""
    place = personal_keys.folder() / ".lock"
    try:
        descriptor = open_lock(place)
    except OSError as error:
        raise FailedError(f"nobody is forgotten: {place} can't be written: {error.strerror}") from None
    try:
        acquire_lock(descriptor, 0)
        yield
    except BlockingIOError:
        raise FailedError(
            f"{describe_lock_holder(descriptor)} is forgetting persons right now: wait until it has ended"
        ) from None
    finally:
        os.close(descriptor)


def _pause_all(
    instances: Sequence[InstanceSettings], subjects: Sequence[str], timeout_s: float
) -> list[InstanceSettings]:
    """Pause all running instances after a checkpoint; return them, to be restarted.

    If that fails, they are resumed. Raises FailedError.
    """
    who = {"who": f"{operator_name()}{_TO_FORGET}"}
    try:
        running = list(filter(_is_running, instances))
        for settings in running:
            ask_coordinator(settings, "pause", who)
        for settings in running:
            take_checkpoint(settings, timeout_s)
            take_checkpoint(settings, timeout_s)  # the first can have begun before the pause
        for settings in instances:
            _rehearse(settings, subjects)
        if list(filter(_is_running, instances)) != running:
            raise FailedError(
                "nobody is forgotten yet: an instance was started or stopped meanwhile: run the command again"
            )
        for settings in running:
            if not control.query(settings.folder, "status")["paused"]:
                raise FailedError(
                    f"nobody is forgotten yet: {settings.name} was resumed, or has crashed: run the command again"
                )
    except BaseException:
        for settings in filter(_is_left_paused, instances):  # also by a command that was killed
            with contextlib.suppress(ImmortalError):
                ask_coordinator(settings, "resume", who)
        raise
    return running


def _is_left_paused(settings: InstanceSettings) -> bool:
    """Return True for an instance that this command has paused and not restarted."""
    with contextlib.suppress(control.ControlError):
        paused = control.query(settings.folder, "status")["paused"]
        return bool(paused) and str(paused["by"]).endswith(_TO_FORGET)
    return False


def _is_running(settings: InstanceSettings) -> bool:
    """Return True if the instance runs, False if it is stopped. Raises FailedError if it can't be restarted, or would
    handle records again.
    """
    coordinator = control.running(settings.folder)
    if coordinator is None:
        refuse_unreachable_holder(settings)
        if "without" in (state := checkpoint_at_stop(settings)):
            raise FailedError(
                f"{settings.name} is stopped{state}. Its next start needs the data: start and stop it first ('immortal"
                f" run {settings.name}', 'immortal stop {settings.name}')"
            )
        return False
    if control.supervisor(settings.folder) is None:
        raise FailedError(cannot_restart_text(settings, coordinator))
    status = control.query(settings.folder, "status")
    if status["paused"] and not _is_left_paused(settings):
        raise FailedError(
            f"{settings.name} is paused by {status['paused']['by']}, and would go on after its restart: 'immortal"
            f" resume {settings.name}' first"
        )
    if standbys := status["standbys"]:
        raise FailedError(f"{standbys[0]['name']} follows the log of {settings.name}, and has its data: stop it first")
    return True


def _rehearse(settings: InstanceSettings, subjects: Sequence[str]) -> None:
    """Start the app from its newest checkpoint as if the persons were forgotten. Raises FailedError if it can't."""
    summary = own_logs.summary_of(settings)
    if summary is None or not summary.checkpoints:
        return
    newest = summary.checkpoints[-1]
    try:
        command = AppCommand.of(default_app(settings.name, settings.app, summary, newest.version))
        environment = {**command.environment, personal_keys.REHEARSED_VARIABLE: json.dumps(subjects)}
        with own_logs.open_reader(settings) as reader:
            plan = ReplayPlan(newest.checkpoint_id, newest.sequence_id)
            run_replay(reader, plan, replace(command, environment=environment), Sink())
    except ImmortalError as error:
        raise FailedError(
            f"nobody is forgotten yet: {settings.name} would not start without the data. If a handler that waits has"
            f" read it, end that first ('immortal handlers {settings.name}'). {error}"
        ) from None
