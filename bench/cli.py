"""Command `immortal bench`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from immortal.bench.calls import measure_failing, print_calls, print_failing, run_call_benchmark
from immortal.bench.embedded import print_embedded, run_embedded_benchmark
from immortal.bench.fleet import measure_fleet, print_fleet
from immortal.bench.isolation import measure_isolation, print_isolation
from immortal.bench.one_way import print_one_way, run_benchmark
from immortal.bench.trim import measure_trimming, print_trim
from immortal.bench.workload import NUMBER_SIZE_BYTES
from immortal.protocol.command_line import echo, json_option

FLEET_SIZE_MAX = 1000  # of some 60 MiB each
OUTSTANDING_MAX = 100_000
STATE_MIB_MAX = 16_384


def numbers(
    what: str, lowest: float, highest: float, example: str, kind: type[float] = int
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
            raise click.BadParameter(f"{value!r}; expected {what}, {lowest} to {highest}, as in {example}")
        return found

    return numbers_of


@click.command()
@click.option(
    "--sizes",
    default="16,64,1024,65536",
    show_default=True,
    callback=numbers("sizes in bytes", 0, 16 << 20, "16,64,1024"),
    help="Arguments, in bytes.",
)
@click.option("--volume", "volume_mb", default=500, show_default=True, help="MB of traffic for each size.")
@click.option("--folder", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Where the logs go.")
@click.option("--trim", is_flag=True, help="Measure instead how long a commit takes while a log is trimmed.")
@click.option("--curve", is_flag=True, help="Measure once more with keys: encrypted and authenticated.")
@click.option("--log-key", is_flag=True, help="Measure with logs that are authenticated with a key.")
@click.option(
    "--fleet",
    "fleet_size",
    type=click.IntRange(2, FLEET_SIZE_MAX),
    metavar="N",
    help="Run instead N instances that each call ten others: what they cost while idle.",
)
@click.option("--isolation", is_flag=True, help="Measure instead what a dead and a stalled peer cost eight others.")
@click.option("--failing", is_flag=True, help="Measure instead what a call that fails costs.")
@click.option(
    "--state",
    default="1,1024",
    show_default=True,
    callback=numbers("sizes in MiB", 1, STATE_MIB_MAX, "1,1024"),
    help="With --failing: sizes of the service's state, in MiB.",
)
@click.option("--calls", is_flag=True, help="Measure instead calls that wait for their answers.")
@click.option("--embedded", is_flag=True, help="Measure instead services in one process beside those with sidecars.")
@click.option(
    "--outstanding",
    default="1,64,1000",
    show_default=True,
    callback=numbers("numbers of calls", 1, OUTSTANDING_MAX, "1,64,1000"),
    help="With --calls: how many calls wait at a time.",
)
@click.option(
    "--size",
    "size_bytes",
    type=click.IntRange(NUMBER_SIZE_BYTES, 16 << 20),
    default=16,
    show_default=True,
    help="With --calls, --embedded: the argument, in bytes.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 3600.0),
    default=2.0,
    show_default=True,
    help="With --calls, --embedded: of one turn, roughly.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="With --calls, --embedded: turns of each, one after the other.",
)
@json_option
def bench(
    sizes: list[int],
    volume_mb: int,
    folder: Path | None,
    trim: bool,
    curve: bool,
    log_key: bool,
    fleet_size: int | None,
    isolation: bool,
    failing: bool,
    state: list[int],
    calls: bool,
    embedded: bool,
    outstanding: list[int],
    size_bytes: int,
    seconds: float,
    repeats: int,
    as_json: bool,
) -> None:
    """One-way calls between two services with durable logs, next to what the disk alone does."""
    others = sum((calls, embedded, trim, isolation, failing, fleet_size is not None))
    if others > 1 or (curve and (calls or embedded or trim or failing)):
        each = "--calls, --embedded, --trim, --curve, --fleet, --failing, --isolation"
        raise click.UsageError(f"{each} each measure something else")
    if log_key and others:
        raise click.UsageError("--log-key is for one-way calls")
    from rich.console import Console

    result: Any
    show: Callable[[Any], None]
    with (
        tempfile.TemporaryDirectory(prefix="immortal-bench-", dir=folder) as name,
        Console(stderr=True).status("starting") as status,
    ):
        where: dict[str, Any] = {"home": Path(name), "progress": status.update}
        if calls:
            result = run_call_benchmark(outstanding, size_bytes=size_bytes, seconds=seconds, repeats=repeats, **where)
            show = print_calls
        elif embedded:
            result = run_embedded_benchmark(size_bytes=size_bytes, seconds=seconds, repeats=repeats, **where)
            show = print_embedded
        elif failing:
            result, show = measure_failing([size_mib << 20 for size_mib in state], **where), print_failing
        elif isolation:
            result, show = measure_isolation(**where), print_isolation
        elif fleet_size is not None:
            result, show = measure_fleet(fleet_size, curve=curve, **where), print_fleet
        elif trim:
            result, show = measure_trimming(**where), print_trim
        else:
            result = run_benchmark(sizes, volume_mb=volume_mb, curve=curve, log_key=log_key, **where)
            show = print_one_way
    if as_json:
        echo(json.dumps(_values(result)))
    else:
        show(result)


def _values(result: Any) -> Any:
    if isinstance(result, list):
        return [_values(one) for one in result]
    computed = [name for name, one in vars(type(result)).items() if isinstance(one, property)]
    return asdict(result) | {name: getattr(result, name) for name in computed}
