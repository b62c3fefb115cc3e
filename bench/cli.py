"""Command `immortal bench`."""

from __future__ import annotations

import json
import platform
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from immortal.bench.calls import calls, embedded, failing, measure_hops
from immortal.bench.fleet import fleet
from immortal.bench.harness import Amounts, Context, progress_lines, show
from immortal.bench.isolation import isolation
from immortal.bench.one_way import one_way
from immortal.bench.workload import NUMBER_SIZE_BYTES
from immortal.protocol.command_line import echo, json_option

SIZE_BYTES_MAX = 16 << 20
FLEET_SIZE_MAX = 1000  # of some 60 MiB each
OUTSTANDING_MAX = 100_000
STATE_MIB_MAX = 16_384
OTHERS = {"calls", "embedded", "failing", "isolation", "fleet"}
"""Options that measure something else than one-way calls."""


def numbers(
    label: str, lowest: float, highest: float, example: str, kind: type[float] = int
) -> Callable[[click.Context, Any, str | None], list[float] | None]:
    """Return a click callback for numbers of type ``kind`` with commas between them."""

    def numbers_of(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
        if value is None:
            return None
        try:
            found = [kind(part) for part in value.split(",")]
        except ValueError:
            found = []
        if not found or not all(lowest <= number <= highest for number in found):
            raise click.BadParameter(f"{value!r}; expected {label}, {lowest} to {highest}, as in {example}")
        return found

    return numbers_of


@click.command()
@click.option(
    "--sizes",
    default="16,64,1024,65536",
    show_default=True,
    callback=numbers("sizes in bytes", 0, SIZE_BYTES_MAX, "16,64,1024"),
    help="Sizes of the arguments, in bytes.",
)
@click.option("--folder", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Folder for the logs.")
@click.option("--curve", is_flag=True, help="Give the instances keys: encrypted and authenticated streams.")
@click.option("--log-key", is_flag=True, help="Authenticate the logs with a key.")
@click.option(
    "--fleet",
    type=click.IntRange(2, FLEET_SIZE_MAX),
    metavar="N",
    help="Measure instead the idle cost of N instances, each with ten peers.",
)
@click.option("--isolation", is_flag=True, help="Measure instead the cost of a dead and a stalled peer to others.")
@click.option("--failing", is_flag=True, help="Measure instead the cost of a failing call.")
@click.option(
    "--state",
    default="1,1024",
    show_default=True,
    callback=numbers("sizes in MiB", 1, STATE_MIB_MAX, "1,1024"),
    help="With --failing: sizes of the service's state, in MiB.",
)
@click.option("--calls", is_flag=True, help="Measure instead calls that wait for their answers.")
@click.option("--where", is_flag=True, help="With --calls: show the time of one call, hop by hop.")
@click.option("--embedded", is_flag=True, help="Measure instead embedded services, and compare with sidecars.")
@click.option(
    "--outstanding",
    default="1,64,1000",
    show_default=True,
    callback=numbers("numbers of calls", 1, OUTSTANDING_MAX, "1,64,1000"),
    help="With --calls: numbers of calls that wait at a time.",
)
@click.option(
    "--size",
    type=click.IntRange(NUMBER_SIZE_BYTES, SIZE_BYTES_MAX),
    default=16,
    show_default=True,
    help="With --calls, --embedded: size of the argument, in bytes.",
)
@click.option(
    "--seconds", type=click.FloatRange(0.01, 3600.0), default=2.0, show_default=True, help="Time of one turn, roughly."
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True, help="Turns of a measurement.")
@json_option
def bench(folder: Path | None, as_json: bool, **options: Any) -> None:
    """Measure one-way calls between two services with durable logs, and the disk alone."""
    chosen = [name for name in OTHERS if options[name]]
    if len(chosen) > 1 or (options["curve"] and chosen not in ([], ["fleet"])):
        each = "--calls, --embedded, --curve, --fleet, --failing, --isolation"
        raise click.UsageError(f"{each} each measure something else: give one")
    if options["log_key"] and chosen:
        raise click.UsageError("--log-key is for one-way calls")
    if options["where"] and chosen != ["calls"]:
        raise click.UsageError("--where is for --calls")
    amounts = Amounts(
        options["repeats"],
        options["seconds"],
        sizes=options["sizes"],
        outstanding=options["outstanding"],
        state_sizes_mib=options["state"],
    )
    measure: dict[str, Callable[[Context], Any]] = {
        "one-way calls": lambda context: one_way(context, curve=options["curve"], log_key=options["log_key"]),
        "calls": lambda context: (measure_hops if options["where"] else calls)(context, options["size"]),
        "embedded": lambda context: embedded(context, options["size"]),
        "failing": failing,
        "isolation": isolation,
        "fleet": lambda context: fleet(context, options["fleet"], curve=options["curve"]),
    }
    label = (*chosen, "one-way calls")[0]
    with progress_lines() as progress:
        figures = measure[label](Context(amounts, folder or Path(tempfile.gettempdir()), progress))
    if as_json:
        echo(json.dumps([asdict(figure) for figure in figures]))
    else:
        show(label, figures)
        optimised = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
        how = "with optimisations" if optimised else "without optimisations: a call takes 1.2 to 1.5 times as long"
        echo(f"Python {platform.python_version()}, built {how}")
