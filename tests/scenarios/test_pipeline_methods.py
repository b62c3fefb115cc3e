"""Option ``method`` in a real Spark: the calls of one method, with a typed column for each argument."""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from immortal.pipeline.errors import SourceError
from immortal.pipeline.source import ImmortalSource
from immortal.protocol import redaction
from immortal.protocol.messages import RpcKind, RpcType
from immortal.protocol.trailer import BatchKind
from tests.helpers.pipeline_app import arguments
from tests.helpers.pipeline_logs import START_NS, Batch, Call, RecordSpec, flip, make_log
from tests.helpers.spark import read, rows
from tests.helpers.typed_app import ALL_TYPES, SELL, Color, Part, Place, Tag

TILL, TILL2, OTHER = (f"tests.helpers.typed_app:{name}" for name in ("Till", "Till2", "Other"))
NOON = dt.datetime(2026, 1, 31, 12, 30, 0, 5, tzinfo=dt.UTC)
NUMBER = uuid.UUID(int=7)
ORDER = ("instance", "sequence_id", "index")


def log_of(folder: Path, name: str, *records: Sequence[Call]) -> Path:
    """Make a log with the calls of these records; before the first comes the initial message."""
    batches = [[Batch(BatchKind.STREAM, "shop", 1, 1, list(calls))] for calls in records]
    initial = Batch(BatchKind.INITIAL, "", 1, 1, [Call(SELL, RpcType.FORK, arguments("no", 1))])
    specs = [RecordSpec(number, START_NS, each) for number, each in enumerate([[initial, *batches[0]], *batches[1:]])]
    return make_log(folder / name / "log", name, specs)


def sell(*values: object) -> Call:
    return Call(SELL, RpcType.FORK, arguments(*values))


def found(frame: DataFrame, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows(frame, *ORDER)]


def types_of(frame: DataFrame) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in frame.schema}


def test_only_the_calls_of_the_method_and_what_does_not_fit(spark: SparkSession, tmp_path: Path) -> None:
    calls = [
        sell("tea", 3),
        Call(ALL_TYPES, RpcType.IMPULSE, arguments(1)),
        Call(SELL, RpcType.ASYNC, arguments("shop", 9, "ink", 1, 5)),
        Call(SELL, RpcType.ASYNC, arguments(9), RpcKind.RETURNED_NOTHING),
        sell(3, "tea"),
        sell("all", 1 << 63),
    ]
    log = log_of(tmp_path, "till", [sell("first", 7)], calls, [sell("needle", 3)])
    flip(log, b"needle", 2)
    frame = read(spark, "messages", log, method="Till.sell", decode=TILL)
    assert list(types_of(frame))[-5:] == ["ok", "reason", "item", "n", "kind_"]
    assert types_of(frame) == types_of(frame) | {"item": "string", "n": "bigint", "kind_": "bigint", "kind": "string"}
    read_rows = rows(frame, *ORDER)
    assert [tuple(row[name] for name in ("index", "item", "n", "kind_", "kind", "ok")) for row in read_rows] == [
        (1, "first", 7, None, "stream", True),
        (0, "tea", 3, None, "stream", True),
        (2, "ink", 1, 5, "stream", True),
        (4, None, None, None, "stream", True),
        (5, None, None, None, "stream", True),
        (-1, None, None, None, None, False),
    ]
    reasons = [row["reason"] for row in read_rows]
    assert reasons[:3] == [None] * 3
    assert all(reason.startswith("the arguments of Till.sell cannot be shown: ") for reason in reasons[3:5])
    assert reasons[5].startswith("record 2 is damaged: ")
    part = spark.read.format("immortal").schema("n long, item string").options(method="sell", decode=TILL)
    assert part.load(str(log)).where("n < 7").collect() == [(3, "tea"), (1, "ink")]


def test_executors_redact_by_the_file_beside_the_home(spark: SparkSession, tmp_path: Path) -> None:
    log = log_of(tmp_path, "till", [sell("needle", 3)])
    (tmp_path / redaction.FILE_NAME).write_text('hide = ["Till.sell.item"]')
    assert found(read(spark, "messages", log, method="Till.sell", decode=TILL), "item", "n") == [(None, 3)]
    hidden, plain = (rows(read(spark, "messages", log, decode=TILL, plain=one), *ORDER) for one in ("false", "true"))
    assert b"needle" not in b"".join(bytes(row["arguments"]) for row in hidden)
    assert "needle" not in repr([row["arguments_json"] for row in hidden])
    assert "needle" in repr([row["arguments_json"] for row in plain])


def test_each_annotation_has_its_type(spark: SparkSession, tmp_path: Path) -> None:
    part = Part("box", Decimal("1.50"), [Part("lid", Decimal(2))])
    given = (
        *(True, 0.5, b"\0\xff", NOON, NOON.date(), NOON.time(), dt.timedelta(seconds=90), NUMBER, Color.RED, "b", 3),
        *(part, Place(1, "top"), {"new"}, (1, "x"), (Tag("t", 0.5), Tag("u")), {"tea": [1, 2]}, {"a": 2}, {"k": [1]}),
    )
    full = Call(ALL_TYPES, RpcType.IMPULSE, arguments(*given, "text", "here"))
    log = log_of(tmp_path, "till", [full, Call(ALL_TYPES, RpcType.IMPULSE, arguments(*given, 7, ""))])
    frame = read(spark, "messages", log, method="Till.all_types", decode=TILL)
    part_type = "struct<name:string,price:decimal(38,18),parts:array<string>>"
    assert dict(list(types_of(frame).items())[10:]) == {
        "flag": "boolean", "ratio": "double", "data": "binary", "at": "timestamp", "day": "date", "hour": "time(6)",
        "took": "interval day to second", "number": "string", "color": "string", "mode": "string", "price": "double",
        "part": part_type, "place": "struct<row:bigint,shelf:string>", "tags": "array<string>",
        "pair": "struct<_1:bigint,_2:string>", "marks": "array<struct<key:string,weight:double>>",
        "stock": "map<string,array<bigint>>", "counts": "map<string,bigint>", "anything": "string", "either": "string",
        "source_": "string",
    }  # fmt: skip
    one, two = rows(frame, "index")
    assert one["at"].astimezone(dt.UTC) == NOON
    assert {name: one[name] for name in list(types_of(frame))[10:] if name != "at"} == {
        "flag": True, "ratio": 0.5, "data": b"\0\xff", "day": NOON.date(), "hour": NOON.time(),
        "took": dt.timedelta(seconds=90), "number": str(NUMBER), "color": "red", "mode": "b", "price": 3.0,
        "part": ("box", Decimal("1.5"), ['{"name":"lid","price":"2","parts":null}']), "place": (1, "top"),
        "tags": ["new"], "pair": (1, "x"), "marks": [("t", 0.5), ("u", None)], "stock": {"tea": [1, 2]},
        "counts": {"a": 2}, "anything": '{"k":[1]}', "either": '"text"', "source_": "here",
    }  # fmt: skip
    assert (two["either"], two["source_"], two["reason"]) == ("7", "", None)


def test_versions_of_a_class_share_a_table(spark: SparkSession, tmp_path: Path) -> None:
    log_of(tmp_path, "new", [sell("tea", 0.5, "cash"), sell("old", 2, 4)])
    log_of(tmp_path, "old", [sell("ink", 3, 1)])
    log_of(tmp_path, "other", [sell("no", 1)])
    for name, app in (("new", TILL2), ("old", TILL), ("other", OTHER)):
        (tmp_path / f"{name}.toml").write_text(f'app = "{app}"\n')
    spark.sql(f"CREATE TABLE sold USING immortal OPTIONS (path '{tmp_path}', method 'sell')")
    try:
        frame = spark.table("sold")
        assert types_of(frame) == types_of(frame) | {"count": "double", "n": "bigint", "kind_": "string"}
        expected = [
            ("new", "tea", None, 0.5, "cash"),
            ("new", "old", 2, None, "4"),  # of the older class, by its third argument
            ("old", "ink", 3, None, "1"),
        ]
        assert found(frame, "instance", "item", "n", "count", "kind_") == expected
    finally:
        spark.sql("DROP TABLE sold")
    assert found(read(spark, "messages", tmp_path / "old", method="Till.sell"), "item", "n", "kind_") == [("ink", 3, 1)]
    log_of(tmp_path, "lost", [sell("far", 1), Call(ALL_TYPES, RpcType.IMPULSE, arguments(1))])
    (tmp_path / "lost.toml").write_text('app = "no.such:App"\n')
    some = read(spark, "messages", tmp_path, method="sell", instance="old,other")
    assert found(some, "item") == [("ink",)]
    every = read(spark, "messages", tmp_path, method="sell")
    (name, item, reason), *others = found(every, "instance", "item", "reason")
    assert (name, item) == ("lost", None)
    assert reason.startswith("the app of 'lost' cannot be loaded: 'no.such:App': there is no module 'no'")
    assert others == [("new", "tea", None), ("new", "old", None), ("old", "ink", None)]


def test_a_stream_has_them_too(spark: SparkSession, tmp_path: Path) -> None:
    log = log_of(tmp_path, "till", [sell("tea", 3)])
    stream = spark.readStream.format("immortal").options(method="Till.sell", decode=TILL).load(str(log))
    query = stream.writeStream.format("memory").queryName("sold").trigger(availableNow=True)
    running = query.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        assert running.awaitTermination(120)
        assert spark.table("sold").select("item", "n").collect() == [("tea", 3)]
    finally:
        running.stop()


def test_an_app_that_cannot_be_loaded_is_named_where_no_class_has_the_method(tmp_path: Path) -> None:
    (tmp_path / "lost.toml").write_text('app = "no.such:App"\n')
    lost = "the app of 'lost' cannot be loaded: 'no.such:App': there is no module 'no'"
    with pytest.raises(SourceError, match=f"^option method: 'Till.sell': {lost}"):
        ImmortalSource({"method": "Till.sell", "path": str(tmp_path)}).schema()
    (tmp_path / "other.toml").write_text(f'app = "{OTHER}"\n')
    with pytest.raises(SourceError, match=f"^option method: 'Till.sell': there are Other.ping; {lost}"):
        ImmortalSource({"method": "Till.sell", "path": str(tmp_path)}).schema()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"method": "Till.sel", "decode": TILL}, "option method: 'Till.sel': there are Till.all_types, Till.sell"),
        (
            {"method": "Other.sell", "decode": f"a={TILL},b={OTHER}"},
            "option method: 'Other.sell': there are Other.ping, Till.all_types, Till.sell",
        ),
        ({"method": "sell"}, "option method: 'sell': no settings beside the logs name an app: add option decode"),
        ({"method": "sell", "table": "raw"}, "option method: 'sell': it is for the table messages, not for 'raw'"),
    ],
)
def test_what_is_said_of_a_wrong_method(tmp_path: Path, options: dict[str, str], expected: str) -> None:
    with pytest.raises(SourceError, match=f"^{re.escape(expected)}$"):
        ImmortalSource({**options, "path": str(tmp_path)}).schema()
