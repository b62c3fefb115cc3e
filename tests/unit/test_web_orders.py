"""Orders of what-ifs: texts of a form, which anybody can send with anything in them; a disk that fails."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from hypothesis import given
from hypothesis import strategies as st

from immortal.coordinator.instances.registry import Registry
from immortal.log import create_log
from immortal.protocol.errors import ImmortalError
from immortal.web import orders
from immortal.web.jobs import WHAT_IFS_MAX, Jobs
from immortal.web.orders import FleetOrder, Order


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    made = Registry(tmp_path_factory.mktemp("home"))
    for name in ("shop", "till"):
        made.register(name, "tcp://127.0.0.1:*")
        create_log(made.load(name).log, name, committer_id=7).close()
    return made


def test_what_a_form_orders(registry: Registry, tmp_path: Path) -> None:
    order = FleetOrder(
        "shop=kiosk_v2:Shop\r\ntill=kiosk.py:Till",
        str(tmp_path),
        "1970-01-01T00:00:01",
        "1970-01-01T01:00:02+01:00",
        "by-key",
        "checks:small",
        "20",
    )
    assert order.arguments(registry) == {
        "changes": {"shop": "kiosk_v2:Shop", "till": "kiosk.py:Till"},
        "code": tmp_path,
        "begin_ns": 10**9,
        "to_ns": 2 * 10**9,
        "effects": "by-key",
        "check": "checks:small",
        "seeds": 20,
    }
    few = FleetOrder("shop=kiosk_v2:Shop").arguments(registry)
    assert (few["code"], few["begin_ns"], few["to_ns"], few["effects"], few["seeds"]) == (None, None, None, "fail", 1)


_FIELDS = ("changes", "code", "begin", "end", "effects", "check", "seeds")
_TEXTS = st.text() | st.sampled_from(
    ["shop=", "shop=a:A", "../shop=a:A", "~=a:A", "2h", "9" * 30, "9999-12-31", "0001-01-01", "\0", "x" * 5000, "a:b"]
)


@given(given=st.dictionaries(st.sampled_from(_FIELDS), _TEXTS))
def test_each_text_is_taken_or_refused_in_words(registry: Registry, given: dict[str, str]) -> None:
    with suppress(ImmortalError, OSError):
        taken = FleetOrder(**{"changes": "shop=kiosk_v2:Shop", **given}).arguments(registry)
        assert taken["changes"].keys() <= {"shop", "till"}
        assert 1 <= taken["seeds"] <= 9999


def test_a_what_if_that_can_not_be_kept_takes_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    jobs = Jobs(tmp_path / "file" / "what-if")
    for _ in range(WHAT_IFS_MAX + 1):
        with pytest.raises(OSError, match="file"):
            jobs.start(Order(str(tmp_path), "shop"))
    jobs.close()


def test_a_log_that_can_not_be_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied", "shop/log")

    monkeypatch.setattr(orders, "run_fleet_order", refused)
    said: list[dict[str, Any]] = []
    orders._answer_what_if(Order("home", fleet=FleetOrder()), said.append)
    assert said == [{"error": "[Errno 13] Permission denied: 'shop/log'"}]
