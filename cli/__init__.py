"""The command `immortal`: the group of all commands. They parse and wire, nothing else."""

from __future__ import annotations

import importlib

import click
from click.shell_completion import CompletionItem

from immortal.coordinator.instances.registry import HOME_DEFAULT, HOME_VARIABLE, Registry
from immortal.protocol import compiled, distribution, redaction, shared_registry
from immortal.protocol.command_line import Commands, echo

_COMMANDS = {
    "Project": {
        "init": ("immortal.cli.project", "Create a project that runs, with a test."),
        "dev": ("immortal.cli.project", "Run a project here: one output, code reloaded when saved."),
        "up": ("immortal.cli.project", "Start a project's services in the background."),
        "down": ("immortal.cli.project", "Stop a project's services cleanly."),
        "ps": ("immortal.cli.status", "List a project's services and their state."),
        "logs": ("immortal.cli.status", "Show what a project's services printed."),
        "shards": ("immortal.cli.shards", "Show or change the number of shards of a keyed class."),
        "systemd": ("immortal.cli.project", "Print systemd units for a project."),
    },
    "Instances": {
        "register": ("immortal.cli.registration", "Create an instance: its settings and its keys."),
        "unregister": ("immortal.cli.registration", "Remove an instance's settings; its log stays."),
        "settings": ("immortal.cli.registration", "List what a settings file may contain."),
        "run": ("immortal.cli.run", "Run an instance: its coordinator and its app."),
        "coordinator": ("immortal.cli.coordinator", "Run a coordinator alone; the app starts elsewhere."),
        "stop": ("immortal.cli.lifecycle", "Stop an instance cleanly, with a checkpoint."),
        "restart": ("immortal.cli.lifecycle", "Restart an instance with today's code."),
        "checkpoint": ("immortal.cli.operations", "Take a checkpoint of a running instance now."),
        "pause": ("immortal.cli.operations", "Pause an instance; its input is logged and waits."),
        "resume": ("immortal.cli.operations", "Resume a paused instance."),
        "forget": ("immortal.cli.forget", "Make the data of a person unreadable, in every copy."),
        "upgrade": ("immortal.cli.operations", "Upgrade an instance to another version at its next start."),
        "migrate": ("immortal.cli.lifecycle", "Move an instance to a standby on another machine."),
    },
    "Observe": {
        "status": ("immortal.cli.status", "Show instances: phase, position, checkpoint, streams."),
        "health": ("immortal.cli.status", "Check that an instance is healthy, for probes."),
        "top": ("immortal.cli.top", "Watch instances and streams live, with rates."),
        "web": ("immortal.web.command", "Serve a web page of all instances."),
        "log": ("immortal.cli.log", "Show, check, copy or compare logs."),
        "sql": ("immortal.cli.sql", "Run an SQL query over logs and states."),
        "trace": ("immortal.cli.trace", "Export traces for Perfetto or OpenTelemetry."),
        "executions": ("immortal.cli.executions", "List executions of handlers; cancel, signal, restart them."),
        "handlers": ("immortal.cli.handlers", "List async handlers that wait, and for what."),
        "dead-letters": ("immortal.cli.dead_letters", "List failed calls that nobody waits for."),
        "peers": ("immortal.cli.peers", "Show and repair an instance's links to its peers."),
        "clock": ("immortal.cli.operations", "Show an instance's clock, and pending clock jumps."),
        "audit": ("immortal.cli.access", "Show admitted and refused callers, and operators' actions."),
        "doctor": ("immortal.cli.doctor", "Check the installation and this machine for problems."),
    },
    "Call": {
        "call": ("immortal.cli.client", "Call a method of an instance and print its result."),
        "serve": ("immortal.web.command", "Serve instances over HTTP, as JSON."),
        "openapi": ("immortal.web.command", "Print what 'serve' serves, as OpenAPI 3.1."),
        "queue": ("immortal.cli.client", "Show a task queue; retry or drop its tasks."),
        "group": ("immortal.cli.handlers", "Show a multicast group; expel a dead member."),
    },
    "Replay": {
        "replay": ("immortal.cli.replay", "Replay a log to any record and show the state."),
        "why": ("immortal.cli.replay", "Explain which message and line set a value."),
        "verify": ("immortal.cli.replay", "Check that a replay gives the same calls and state."),
        "what-if": ("immortal.cli.what_if", "Compare what other code would have done with the log."),
        "sample": ("immortal.cli.sample", "Extract a small fleet for tests from a large one."),
        "recover": ("immortal.cli.recovery", "Check whether an instance can recover, and what is damaged."),
        "skip": ("immortal.cli.recovery", "Skip one message of the log: its call fails."),
    },
    "Fleet": {
        "registry": ("immortal.cli.registration", "Share a registry among many machines."),
        "keys": ("immortal.cli.access", "Show, renew or revoke keys of instances and callers."),
        "archive": ("immortal.cli.archive", "Copy a log to object storage as it grows."),
        "restore": ("immortal.cli.archive", "Restore a log from an archive, at any moment."),
        "files": ("immortal.cli.files", "Store files for calls; remove unused ones."),
        "pipeline": ("immortal.pipeline.cli", "Run Spark jobs over the logs of a fleet."),
        "bench": ("immortal.bench.cli", "Measure calls between two services here."),
    },
}
"""Commands by section: the module that has the command, imported when it is used, and its help in one line."""
_MODULES = {name: row for section in _COMMANDS.values() for name, row in section.items()}


class _Main(Commands):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _MODULES:
            return None
        try:
            module = importlib.import_module(_MODULES[name][0])
        except ModuleNotFoundError as error:
            if error.name != "immortal.bench":
                raise
            raise click.ClickException(
                "'immortal bench' measures from a checkout of the source, which this installation is not:"
                " clone it, and run 'scripts/setup' and '.venv/bin/immortal bench' there"
            ) from None
        command = getattr(module, name.replace("-", "_"))
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = formatter.width - 6 - max(map(len, _MODULES))
        for title, section in _COMMANDS.items():
            with formatter.section(title):
                rows = [(name, click.Command(name, help=text)) for name, (_, text) in section.items()]
                formatter.write_dl([(name, row.get_short_help_str(width)) for name, row in rows], col_max=14)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in sorted(_MODULES) if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name, help=_MODULES[name][1]) for name in names] + options


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--home",
    envvar=HOME_VARIABLE,
    show_envvar=True,
    default=HOME_DEFAULT,
    show_default=True,
    type=click.Path(file_okay=False),
    help="Registry folder, or postgresql://USER@HOST/DATABASE for a registry that many machines share.",
)
@click.version_option(
    package_name=distribution.NAME,
    prog_name="immortal",
    message=f"%(prog)s, version %(version)s, {compiled.describe()}",
)
@click.pass_context
def main(ctx: click.Context, home: str) -> None:
    """Virtual resiliency: services that survive kill -9 with nothing lost and nothing doubled."""
    distribution.refuse_another()
    ctx.obj = registry = Registry(home)
    shared_registry.chosen_home = registry.home if registry.copy is None else registry.copy.url
    if registry.copy is not None and registry.copy.problem:
        echo(f"{registry.copy.problem}; the last known registry, in {registry.home}, is used", err=True)
    redaction.set_rules(None)
    if redaction.rules().problem:
        echo(redaction.rules().problem, err=True)
