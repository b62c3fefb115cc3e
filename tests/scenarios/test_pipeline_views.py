"""The tables of `immortal sql` on Spark: the same rows, of the same moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from immortal.pipeline.errors import SourceError
from immortal.pipeline.session import make_views
from tests.helpers.cli import HOME, immortal
from tests.helpers.sight_fleet import make_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUERIES = {
    "messages": "select instance, method, arguments_json, sequence_id, `index` from messages order by 1, 4, 5",
    "instances": "select instance, app, last_sequence_id from instances order by 1",
    "waiting": "select instance, handler, kind, sequence_id from waiting order by 1, 2",
    "counter.words": "select key, text, times from `counter.words` order by key",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("views")
    make_fleet(folder, ["the", "cat", "the"])
    return folder


def rows(spark: SparkSession, query: str) -> list[dict[str, Any]]:
    return [row.asDict() for row in spark.sql(query).collect()]


def test_spark_sees_what_sql_sees(spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    others = ["timers", "effects", "clients", "records", "outputs", "counter"]
    make_views(spark, [*QUERIES, *others], home=folder / HOME, folder=folder / "now")
    for query in QUERIES.values():
        told = query.replace("`counter.words`", "counter.words").replace("`", '"')
        said = [json.loads(line) for line in immortal(folder, "sql", told, "--json").splitlines()]
        assert rows(spark, query) == said, query
    joined = "select w.handler from waiting w join timers t on w.instance = t.instance and w.id = t.id"
    assert rows(spark, joined) == [{"handler": "later"}]
    assert rows(spark, "select effect from effects") == [{"effect": "rate"}]
    assert rows(spark, "select total from counter") == [{"total": 3}]
    assert rows(spark, "select * from clients") == []
    make_views(spark, ["counter.words"], home=folder / HOME, folder=folder / "then", at=2, instances=["counter"])
    assert rows(spark, "select key, times from `counter.words`") == [{"key": "the", "times": 1}]


def test_what_can_not_be_had(spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for tables, why in ((["nowhere"], "there are messages"), ("waiting", "a list of names"), ([], "a list of names")):
        with pytest.raises(SourceError, match=why):
            make_views(spark, tables, home=folder / HOME, folder=folder / "wrong")
    (folder / "full").mkdir()
    (folder / "full" / "timers.parquet").touch()
    with pytest.raises(SourceError, match="there already"):
        make_views(spark, ["timers"], home=folder / HOME, folder=folder / "full")
