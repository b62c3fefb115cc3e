"""Statistics of calls: counts, bytes, partners, and the time from sending to logging."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 (as everywhere)

from immortal.pipeline.jobs.sources import Fleet, Unreadable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

BINS_MAX = 120
"""Maximum of intervals into which the time of the logs is cut; fewer if there would be too many rows ..."""

BIN_ROWS_MAX = 10_000
BINS_MIN = 20  # ... but as many as this

METHODS_MAX = 1_000
TALKERS_MAX = 1_000
OUTSIDE = "outside"
_SECOND_NS = 1_000_000_000
_DAY_NS = 86_400 * _SECOND_NS
_BIN_SIZES_NS: tuple[int, ...] = (
    *(n * 10**digits for digits in range(6, 9) for n in (1, 2, 5)),  # from 1 ms
    *(n * unit * _SECOND_NS for unit in (1, 60) for n in (1, 2, 5, 10, 20, 30)),
    *(n * 3600 * _SECOND_NS for n in (1, 2, 3, 6, 12)),
    *(n * _DAY_NS for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)
_PERCENTILES = (0.5, 0.95, 0.99)
_ACCURACY = 1_000  # of percentiles of sizes: a rank is off by at most 1 / this
_BUCKETS_PER_E = 100  # so a bucket of times is 1 % wide

# What Spark's grouping_id() says: a bit for each of sender, method, bin_ns that is not part of the grouping.
_BY_SERVICE, _BY_METHOD, _BY_BIN, _BY_TALKER = 0b01110, 0b01010, 0b01100, 0b00110


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one kind of calls. Times are from sending to logging, by two clocks, ± 1 % except the longest."""

    calls: int
    size_bytes: int  # of arguments
    median_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class ServiceStats:
    instance: str
    figures: Figures
    first_ns: int  # logged
    last_ns: int
    records: int
    record_size_bytes: int
    messages_median: float  # per record
    messages_p99: float
    messages_max: int
    damaged: int


@dataclass(frozen=True, slots=True)
class MethodStats:
    instance: str
    method: str  # its name, if a class was given; otherwise its ID
    figures: Figures


@dataclass(frozen=True, slots=True)
class BinStats:
    """Figures of a service in one interval of time."""

    instance: str
    start_ns: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class TalkerStats:
    """Figures of a pair of services. ``sender`` is the receiver itself for its own calls, OUTSIDE for impulses."""

    sender: str
    receiver: str
    figures: Figures


@dataclass(slots=True)
class Stats:
    services: list[ServiceStats]
    methods: list[MethodStats]  # most calls first
    bin_ns: int  # how long the parts are that the time is cut into
    bins: list[BinStats]  # in the order of time; without those in which a service did nothing
    talkers: list[TalkerStats]  # most bytes first
    unreadable: Sequence[Unreadable] = ()


def stats(spark: SparkSession, fleet: Fleet, *, decode: str | None = None) -> Stats:
    """Return the statistics of all messages except the initial ones. ``decode``: as the data source's option."""
    records = _records(spark, fleet)
    times = [row[name] for row in records for name in ("first_ns", "last_ns") if row[name] is not None]
    bin_ns = bin_size_ns(max(times) - min(times) if times else 0, len(records))
    figures = _figures_of(_calls(spark, fleet, decode, bin_ns)).persist()
    try:
        services = {row["instance"]: row for row in _rows(figures, _BY_SERVICE, "instance")}
        methods = _rows(figures, _BY_METHOD, "-calls", "instance", "method", limit=METHODS_MAX)
        bins = _rows(figures, _BY_BIN, "bin_ns", "instance")
        talkers = _rows(figures, _BY_TALKER, "-size_bytes", "sender", "instance", limit=TALKERS_MAX)
    finally:
        figures.unpersist()
    return Stats(
        _services(records, services),
        [MethodStats(row["instance"], row["method"], _to_figures(row)) for row in methods],
        bin_ns,
        [BinStats(row["instance"], row["bin_ns"], _to_figures(row)) for row in bins],
        [TalkerStats(row["sender"], row["instance"], _to_figures(row)) for row in talkers],
        fleet.unreadable,
    )


def bin_size_ns(span_ns: int, services_count: int) -> int:
    """Return the smallest size of bin that gives not too many bins."""
    bins_max = max(BINS_MIN, min(BINS_MAX, BIN_ROWS_MAX // max(1, services_count)))
    return next((size_ns for size_ns in _BIN_SIZES_NS if span_ns <= size_ns * bins_max), _BIN_SIZES_NS[-1])


def _calls(spark: SparkSession, fleet: Fleet, decode: str | None, bin_ns: int) -> DataFrame:
    """Return one row for each counted call. Times in flight are in buckets that are 1 % wide."""
    columns = ["instance", "time_ns", "kind", "source", "sent_ns", "method_id", "method", "arguments", "ok"]
    latency_ns = F.col("time_ns") - F.col("sent_ns")
    return (
        fleet.table(spark, "messages", columns, decode=decode)
        .where("ok and kind <> 'initial'")
        .select(
            "instance",
            F.when(F.col("kind").isin("impulse", "client"), F.lit(OUTSIDE)).otherwise(F.col("source")).alias("sender"),
            F.coalesce("method", F.concat(F.lit("method "), F.col("method_id").cast("string"))).alias("method"),
            (F.col("time_ns") - F.col("time_ns") % bin_ns).alias("bin_ns"),
            (F.signum(latency_ns) * F.floor(F.log1p(F.abs(latency_ns)) * _BUCKETS_PER_E)).cast("int").alias("bucket"),
            "time_ns",
            F.length("arguments").cast("long").alias("size_bytes"),
            latency_ns.alias("latency_ns"),
        )
    )


def _figures_of(calls: DataFrame) -> DataFrame:
    """Aggregate all groupings in one pass: rows of figures, with the grouping's number in the column "by"."""
    keys = [F.col(name) for name in ("instance", "sender", "method", "bin_ns", "bucket")]
    instance, sender, method, bin_ns, bucket = keys
    sets = [[instance, bucket], [instance, method, bucket], [instance, bin_ns, bucket], [instance, sender, bucket]]
    by_bucket = calls.groupingSets(sets, *keys).agg(
        F.grouping_id().alias("by"),
        F.count(F.lit(1)).alias("calls"),
        F.sum("size_bytes").alias("size_bytes"),
        F.max("latency_ns").alias("longest_ns"),
        F.min("time_ns").alias("first_ns"),
        F.max("time_ns").alias("last_ns"),
    )
    return by_bucket.groupBy("by", "instance", "sender", "method", "bin_ns").agg(
        F.sum("calls").alias("calls"),
        F.sum("size_bytes").alias("size_bytes"),
        F.percentile("bucket", list(_PERCENTILES), F.col("calls")).alias("percentiles"),
        F.max("longest_ns").alias("longest_ns"),
        F.min("first_ns").alias("first_ns"),
        F.max("last_ns").alias("last_ns"),
    )


def _rows(figures: DataFrame, by: int, *order: str, limit: int | None = None) -> list[Row]:
    wanted = figures.where(F.col("by") == by)
    wanted = wanted.orderBy(*[F.desc(name[1:]) if name.startswith("-") else F.asc(name) for name in order])
    return (wanted if limit is None else wanted.limit(limit)).collect()


def _records(spark: SparkSession, fleet: Fleet) -> list[Row]:
    records = fleet.table(spark, "records", ["instance", "message_count", "size_bytes", "time_ns", "ok"])
    sound_ns = F.when(F.col("ok"), F.col("time_ns"))
    return (
        records.groupBy("instance")
        .agg(
            F.count_if("ok").alias("records"),
            F.count_if(~F.col("ok")).alias("damaged"),
            F.sum("size_bytes").alias("size_bytes"),
            F.percentile_approx("message_count", [0.5, 0.99], _ACCURACY).alias("percentiles"),
            F.max("message_count").alias("most"),
            F.min(sound_ns).alias("first_ns"),
            F.max(sound_ns).alias("last_ns"),
        )
        .orderBy("instance")
        .collect()
    )


def _services(records: Iterable[Row], calls_by_service: Mapping[str, Row]) -> list[ServiceStats]:
    found = []
    for row in records:
        calls = calls_by_service.get(row["instance"])
        median, high = row["percentiles"] or (0, 0)
        found.append(
            ServiceStats(
                row["instance"],
                _to_figures(calls) if calls is not None else Figures(0, 0, 0.0, 0.0, 0.0, 0.0),
                calls["first_ns"] if calls is not None else 0,
                calls["last_ns"] if calls is not None else 0,
                row["records"],
                row["size_bytes"] or 0,
                float(median),
                float(high),
                row["most"] or 0,
                row["damaged"],
            )
        )
    return found


def _to_figures(row: Row) -> Figures:
    longest_ms = row["longest_ns"] / 1e6
    median, p95, p99 = (min(_middle_ms(bucket), longest_ms) for bucket in row["percentiles"])
    return Figures(row["calls"], row["size_bytes"], median, p95, p99, longest_ms)


def _middle_ms(bucket: float) -> float:
    if bucket == 0:
        return 0.0
    return math.copysign(math.expm1((abs(bucket) + 0.5) / _BUCKETS_PER_E) / 1e6, bucket)
