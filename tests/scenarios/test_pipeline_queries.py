"""Each query sees the rows that it asks for, whatever was asked of the same DataFrame before: compared with a copy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as everywhere)

from tests.helpers.effort import effort
from tests.helpers.pipeline_logs import make_log, random_specs
from tests.helpers.spark import read

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
COUNTS = {"alice": 30, "bob": 12, "carol": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for seed, (name, count) in enumerate(COUNTS.items()):
        make_log(home / name / "log", name, random_specs(seed, count))
    return home


@contextmanager
def pushdown(spark: SparkSession, value: str) -> Iterator[None]:
    """As a user may set it for a source of their own."""
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, value)
    try:
        yield
    finally:
        spark.conf.set(PUSHDOWN, before)


# --- what is known ---------------------------------------------------------------------------------------------------


def test_a_filter_leaves_nothing_behind(spark: SparkSession, home: Path) -> None:
    with pushdown(spark, "true"):
        frame = read(spark, "records", home)
        frame.createOrReplaceTempView("known_records")
        for name, count in list(COUNTS.items())[:2]:
            assert frame.where(f"instance = '{name}'").count() == count
            assert frame.count() == sum(COUNTS.values())
            assert spark.sql(f"select * from known_records where instance = '{name}'").count() == count
            assert spark.table("known_records").count() == sum(COUNTS.values())
        assert {row[0]: row[1] for row in frame.groupBy("instance").count().collect()} == COUNTS
        alice, bob = (frame.where(f"instance = '{name}'") for name in ("alice", "bob"))
        assert alice.union(bob).count() == COUNTS["alice"] + COUNTS["bob"]
        assert alice.join(bob, "sequence_id").count() == COUNTS["bob"]
        assert frame.where("sequence_id >= 10").count() == 20 + 2
        assert frame.where("sequence_id < 10").count() == 10 + 10 + 1


# --- queries in any order, compared with a plain copy ----------------------------------------------------------------

PREDICATES = (
    "instance = 'alice'",
    "instance in ('bob', 'carol')",
    "instance <> 'alice'",
    "instance like 'b%'",
    "instance is not null",
    "sequence_id = 7",
    "sequence_id >= 9 and sequence_id < 21",
    "sequence_id in (0, 3, 11)",
    "sequence_id < 5 or instance = 'carol'",
    "time_ns > 1700000000010000000",
    "time <= timestamp_micros(1700000000008000)",
    "instance = 'nobody'",
    "size_bytes > 200",
    "not ok",
)


@dataclass
class Pair:
    """The same DataFrame over logs and over a copy of them."""

    ours: DataFrame
    plain: DataFrame
    view: str = ""

    def both(self, change: Callable[[DataFrame], DataFrame]) -> Pair:
        return Pair(change(self.ours), change(self.plain))


@dataclass
class Run:
    spark: SparkSession
    draw: random.Random
    pairs: list[Pair]
    done: list[str] = field(default_factory=list)
    cached: list[DataFrame] = field(default_factory=list)

    def step(self) -> None:
        pair = self.draw.choice(self.pairs)
        steps = (
            self.where,
            self.where,
            self.where,
            self.union,
            self.join,
            self.view,
            self.cache,
            self.aggregate,
            self.select,
        )
        made = self.draw.choice(steps)(pair)
        if made is not None and len(self.pairs) < 12:
            self.pairs.append(made)
        self.compare(made or pair)
        self.compare(self.draw.choice(self.pairs[:2]))  # whole tables must be whole, whatever came before

    def where(self, pair: Pair) -> Pair:
        predicate = self.draw.choice(PREDICATES)
        self.done.append(f"where {predicate}")
        return pair.both(lambda frame: frame.where(predicate))

    def union(self, pair: Pair) -> Pair:
        other = self.draw.choice(self.pairs)
        self.done.append("union")
        return Pair(pair.ours.union(other.ours).distinct(), pair.plain.union(other.plain).distinct())

    def join(self, pair: Pair) -> Pair:
        """With itself, or with another; what has no match is left."""
        other, kind = self.draw.choice(self.pairs), self.draw.choice(("left_semi", "left_anti"))
        one, two = self.draw.sample(PREDICATES, 2)
        self.done.append(f"{kind} join: {one}; {two}")

        def joined(left: DataFrame, right: DataFrame) -> DataFrame:
            ids = right.where(two).select(F.col("sequence_id").alias("other")).distinct()
            return left.where(one).join(ids, F.col("sequence_id") == F.col("other"), kind)

        return Pair(joined(pair.ours, other.ours), joined(pair.plain, other.plain))

    def view(self, pair: Pair) -> Pair:
        predicate = self.draw.choice(PREDICATES)
        self.done.append(f"view where {predicate}")
        pair.ours.createOrReplaceTempView("query_ours")
        pair.plain.createOrReplaceTempView("query_plain")
        sql = (
            f"select * from {{0}} where {predicate} or sequence_id in (select max(sequence_id) from {{0}}"
            " where instance = 'bob')"
        )
        return Pair(self.spark.sql(sql.format("query_ours")), self.spark.sql(sql.format("query_plain")))

    def cache(self, pair: Pair) -> None:
        if self.cached:
            self.done.append("unpersist")
            self.cached.pop().unpersist()
        else:
            self.done.append("cache")
            self.cached.append(pair.ours.cache())

    def aggregate(self, pair: Pair) -> None:
        self.done.append("groupBy")
        by = pair.both(
            lambda frame: frame.groupBy("instance").agg(F.count("*"), F.max("sequence_id"), F.sum("size_bytes"))
        )
        self.compare(by)

    def select(self, pair: Pair) -> None:
        """Some columns, and each row beside those of its own log that come next: a join with itself."""
        predicate = self.draw.choice(PREDICATES)
        self.done.append(f"select, join with itself where {predicate}")
        next_id = F.col("sequence_id") + 1

        def joined(frame: DataFrame) -> DataFrame:
            behind = frame.where(predicate).select("instance", next_id.alias("sequence_id"), "size_bytes")
            return frame.select("instance", "sequence_id", "time").join(behind, ["instance", "sequence_id"])

        self.compare(pair.both(joined))

    def stream(self, stream: DataFrame, folder: Path) -> None:
        """All that is there, with a filter or without."""
        predicate = self.draw.choice([*PREDICATES[:4], "true"])
        self.done.append(f"stream where {predicate}")
        writer = stream.where(predicate).writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(folder / "at")).trigger(availableNow=True)
        assert writer.start(str(folder / "rows")).awaitTermination(60)
        whole = self.pairs[0].plain
        self.compare(Pair(self.spark.read.parquet(str(folder / "rows")), whole.where(predicate)))

    def compare(self, pair: Pair) -> None:
        ours, plain = (Counter(map(tuple, frame.collect())) for frame in (pair.ours, pair.plain))
        assert ours == plain, self.done
        if self.draw.random() < 0.3:
            assert pair.ours.count() == plain.total(), self.done


STEPS = 4  # plans of plans: each takes longer than the one before


@pytest.mark.parametrize("seed", range(effort(1)))
def test_queries_in_any_order_see_what_a_plain_copy_has(
    spark: SparkSession, home: Path, tmp_path: Path, seed: int
) -> None:
    columns = ("instance", "sequence_id", "time", "time_ns", "size_bytes", "ok")
    pairs = []
    for number in range(2):  # two loads of the same logs: neither must see the other's filters
        ours = read(spark, "records", home, partitionBytes=4096 if number else 1 << 20).select(*columns)
        ours.write.parquet(str(tmp_path / f"plain-{number}"))
        pairs.append(Pair(ours, spark.read.parquet(str(tmp_path / f"plain-{number}"))))
    stream = spark.readStream.format("immortal").option("table", "records").load(str(home)).select(*columns)
    draw = random.Random(seed)
    run = Run(spark, draw, pairs)
    with pushdown(spark, draw.choice(("true", "false"))):
        streamed_at = draw.randrange(STEPS)
        for number in range(STEPS):
            run.step()
            if number == streamed_at:
                run.stream(stream, tmp_path / "stream")
    for frame in run.cached:
        frame.unpersist()
