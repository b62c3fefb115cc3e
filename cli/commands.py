"""The group of all commands."""

from __future__ import annotations

import importlib

import click
from click.shell_completion import CompletionItem

from immortal.coordinator.instances.registry import HOME_DEFAULT, HOME_VARIABLE, Registry
from immortal.protocol import compiled
from immortal.protocol.command_line import Commands, echo

_PLACES = {
    "archive": "immortal.cli.archive:archive",
    "audit": "immortal.cli.access:audit",
    "bench": "immortal.bench.cli:bench",
    "call": "immortal.cli.client:call",
    "checkpoint": "immortal.cli.operations:checkpoint",
    "clock": "immortal.cli.operations:clock",
    "coordinator": "immortal.cli.coordinator:coordinator",
    "dead-letters": "immortal.cli.dead_letters:dead_letters",
    "dev": "immortal.cli.project:dev",
    "doctor": "immortal.cli.doctor:doctor",
    "down": "immortal.cli.project:down",
    "group": "immortal.cli.handlers:group",
    "handlers": "immortal.cli.handlers:handlers",
    "health": "immortal.cli.status:health",
    "init": "immortal.cli.project:init",
    "keys": "immortal.cli.access:keys",
    "log": "immortal.cli.log:log",
    "logs": "immortal.cli.project_status:logs",
    "migrate": "immortal.cli.lifecycle:migrate",
    "pause": "immortal.cli.operations:pause",
    "peers": "immortal.cli.peers:peers",
    "pipeline": "immortal.pipeline.cli:pipeline",
    "ps": "immortal.cli.project_status:ps",
    "queue": "immortal.cli.client:queue",
    "recover": "immortal.cli.recovery:recover",
    "register": "immortal.cli.registration:register",
    "registry": "immortal.cli.registration:registry",
    "replay": "immortal.cli.replay:replay",
    "restart": "immortal.cli.lifecycle:restart",
    "restore": "immortal.cli.archive:restore",
    "resume": "immortal.cli.operations:resume",
    "run": "immortal.cli.run:run",
    "settings": "immortal.cli.registration:settings",
    "skip": "immortal.cli.recovery:skip",
    "sql": "immortal.cli.sql:sql",
    "status": "immortal.cli.status:status",
    "stop": "immortal.cli.lifecycle:stop",
    "systemd": "immortal.cli.project:systemd",
    "trace": "immortal.cli.trace:trace",
    "unregister": "immortal.cli.registration:unregister",
    "up": "immortal.cli.project:up",
    "upgrade": "immortal.cli.operations:upgrade",
    "verify": "immortal.cli.replay:verify",
    "web": "immortal.web.command:web",
    "what-if": "immortal.cli.what_if:what_if",
}
"""Each is loaded when it is asked for: what runs one, a coordinator above all, need not hold the others."""

_HELP = {
    "archive": "Ship the log of NAME to object storage as it grows, and say what is there.",
    "audit": "Show who was let in, who was refused, and what operators did with NAME.",
    "bench": "One-way calls between two services with durable logs, next to what the disk alone does.",
    "call": "Call METHOD of an instance, and print what it returns, as JSON.",
    "checkpoint": "Let a running instance take a checkpoint now, and wait until it is durable.",
    "clock": "Show the time of a running instance, and whether a jump of its machine's clock is held back.",
    "coordinator": "Run a coordinator alone, for an app that is started by other means.",
    "dead-letters": "Show the calls to NAME that failed and that nobody waits for: forks and impulses.",
    "dev": "Run all services of a project here, with one log, and with their code as it is saved.",
    "doctor": "Say what is wrong here: with the installation, the home, its disks, the clock, limits and memory.",
    "down": "Stop all services of a project cleanly, each with a checkpoint, and wait until they have ended.",
    "group": "Look at a named group of ordered multicasts, expel a member that is dead.",
    "handlers": "Show the 'async def' handlers of NAME that wait: for what, since when, and at which line.",
    "health": "Say whether NAME is well: status 0, or 1 with the reason, for probes.",
    "init": "Make a project that runs, with a test, in the folder NAME, or in this one.",
    "keys": "Show the public keys of an instance and of those that may call it, and where they come from.",
    "log": "Look into an instance's log.",
    "logs": "Show what the services have said under 'immortal up', all or those named, by time.",
    "migrate": "Hand an instance over to another machine that follows its log, and wait until it works there.",
    "pause": "Let a running instance take no more input: it is logged, and waits until the instance is resumed.",
    "peers": "Look at an instance's peers, begin anew with one whose log was wiped or replaced, end what a stale copy"
    " began.",
    "pipeline": "Jobs over the logs of a whole fleet, on Spark.",
    "ps": "Show all services of a project: what runs, since when, and what does not.",
    "queue": "Look at a queue of tasks, try its dead letters again, drop tasks.",
    "recover": "Say what a recovery of NAME would do, what is damaged and what helps.",
    "register": "Write the settings of a new instance, and make its keys.",
    "registry": "Change what many machines share of an instance; bring a folder's registry into a database.",
    "replay": "Take NAME back to any record: its log is replayed into a copy of its app.",
    "restart": "Stop an instance cleanly and start it again, with the code as it is now, and wait until it works.",
    "restore": "Bring a log back from an archive, as of its end or of an earlier moment.",
    "resume": "Let an instance that is paused go on with what its log has for it.",
    "run": "Run an instance: its coordinator and its app, as two processes that live and die together.",
    "settings": "Show what a settings file may say, as the Markdown table of docs/guide/settings.md.",
    "skip": "Let NAME pass over one message of its log: the call fails, the state is as if it had never come.",
    "sql": "Run a QUERY over logs and states; the instances may run, and notice nothing.",
    "status": "Show all instances, or one: phase, sequence ID, checkpoint, the positions of each stream, backlog.",
    "stop": "Stop an instance cleanly, with a checkpoint, and wait until it has ended.",
    "systemd": "Print systemd's unit files of a project: a service for each instance, and a target for all.",
    "trace": "Give what happened to viewers of traces: Perfetto, and all that take OpenTelemetry's.",
    "unregister": "Remove an instance's settings; its log stays unless --delete-log is given.",
    "up": "Run all services of a project in the background, and wait until they are ready.",
    "upgrade": "Mark an instance: at its next start the app's state and code become those of another version.",
    "verify": "Prove that NAME does again what it did: replay it from checkpoint to checkpoint, and compare.",
    "web": "Serve a page of all instances: what runs, what waits, the log of each, and any moment of it.",
    "what-if": "What would be different if other code had handled the log of NAME?",
}
"""What each is for, as it says itself: the list of all of them, and completion, load none of them."""


class _Main(Commands):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_PLACES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _PLACES:
            return None
        module_name, _, attribute = _PLACES[name].partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != "immortal.bench":
                raise
            raise click.ClickException(
                "'immortal bench' measures from a checkout of the source, which this installation is not:"
                " clone it, and run 'scripts/setup' and '.venv/bin/immortal bench' there"
            ) from None
        command = getattr(module, attribute)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = formatter.width - 6 - max(map(len, _PLACES))
        with formatter.section("Commands"):
            stand_ins = [click.Command(name, help=_HELP[name]) for name in sorted(_PLACES)]
            formatter.write_dl([(str(one.name), one.get_short_help_str(width)) for one in stand_ins])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in sorted(_PLACES) if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name, help=_HELP[name]) for name in names] + options


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--home",
    envvar=HOME_VARIABLE,
    default=HOME_DEFAULT,
    show_default=True,
    type=click.Path(file_okay=False),
    help=f"The registry folder, or postgresql://USER@HOST/DATABASE for one of many machines; or set {HOME_VARIABLE}.",
)
@click.version_option(
    package_name="immortal", prog_name="immortal", message=f"%(prog)s, version %(version)s, {compiled.describe()}"
)
@click.pass_context
def main(ctx: click.Context, home: str) -> None:
    """Virtual resiliency: services that survive kill -9 with nothing lost and nothing doubled."""
    ctx.obj = registry = Registry(home)
    if registry.copy is not None and registry.copy.problem:
        echo(f"{registry.copy.problem}; the registry as it was last is in {registry.home}", err=True)
