"""Rules of redaction: what they hide of calls and states, with all names known or some unknown, and wrong files."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from immortal.appsdk.calls.user_code import describe_arguments, describe_result
from immortal.appsdk.state.tree import Fields, Members, canonical, differences, to_json
from immortal.protocol import redaction
from immortal.protocol.executions import Execution, _redacted
from immortal.protocol.redaction import REDACTED, Redacted, Rules

NAMES = st.sampled_from("abc")
TREES = st.recursive(
    st.integers(0, 3) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)
RULES = st.lists(st.lists(NAMES | st.just("*"), min_size=2, max_size=4).map(tuple), max_size=3).map(tuple)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(redaction, "parameters", {})  # without classes of other tests
    yield
    redaction.set_rules(None)


def use(tmp_path: Path, *paths: str) -> None:
    file = tmp_path / redaction.FILE_NAME
    file.write_text(f"hide = {json.dumps(paths)}\n")
    redaction.set_rules(redaction.read_rules(file))
    assert not redaction.rules().problem


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value without parts, with the names on the way to it."""
    if isinstance(tree, dict):
        for name, part in tree.items():
            yield from leaves(part, (*path, name))
    elif isinstance(tree, list):
        for part in tree:
            yield from leaves(part, path)
    else:
        yield path, tree


def fits(rule: Sequence[str], path: Sequence[str]) -> bool:
    return all(one in ("*", name) for one, name in zip(rule, path, strict=False))


def is_plain(path: tuple[str, ...], value: Any, rules: Rules) -> bool:
    """Return True if no rule is for the leaf, for what it is in, or for a part of what it is in place of."""
    for rule in rules.rules:
        whole = ("C", *path)
        if fits(rule, whole) and (len(rule) <= len(whole) or value is not None):
            return False
    for rule in rules.anywhere:
        for start in range(len(path)):
            tail = path[start:]
            if fits(rule, tail) and (len(rule) <= len(tail) or value is not None):
                return False
    return True


@given(TREES, RULES, RULES)
def test_exactly_what_a_rule_names_is_hidden(tree: Any, rules: Any, anywhere: Any) -> None:
    made = Rules(tuple(("C", *rule[1:]) for rule in rules), anywhere)
    redaction.set_rules(made)
    shown = redaction.redact({"a": tree}, (), {"C"})
    plain = [one for one in leaves({"a": tree}) if is_plain(*one, made)]
    assert [one for one in leaves(shown) if not isinstance(one[1], Redacted)] == plain
    assert to_json(shown, reveals=True) == {"a": tree}


@given(TREES, TREES, RULES)
def test_a_difference_stays_one_and_is_not_shown(old: Any, new: Any, rules: Any) -> None:
    redaction.set_rules(Rules(rules))
    one, other = (redaction.redact(each, (), {"a"}) for each in (old, new))
    assert (next(differences(one, other), None) is None) == (next(differences(old, new), None) is None)
    assert (canonical(one) == canonical(other)) == (canonical(old) == canonical(new))


def test_arguments_by_their_names(tmp_path: Path) -> None:
    use(tmp_path, "Cart.pay.card", "Cart.pay.address.street", "*.password")
    given = [7, "4111", {"street": "Main", "city": "Bern"}, [{"password": "x", "id": 1}]]
    shown = redaction.arguments("Cart.pay", given, ["item", "card", "address", "more"])
    assert repr(shown) == "[7, [redacted], {'street': [redacted], 'city': 'Bern'}, [{'password': [redacted], 'id': 1}]]"
    assert redaction.arguments("pay", [None], ["address"]) == [None]
    assert redaction.arguments("pay", ["Main 1, Bern"], ["address"])[0] == Redacted("Main 1, Bern")
    assert repr(redaction.arguments("other", [1, 2], ["item", "password"])) == "[1, [redacted]]"
    assert redaction.result("Cart.pay", 4) == 4
    assert redaction.result("Cart.pay", deque([Counter(a=1)])) == deque([Counter(a=1)])
    assert "Main" not in repr(redaction.result("pay", {"x": deque([{"password": "Main"}])}))


def test_unknown_names_hide_all_that_they_could_be(tmp_path: Path) -> None:
    use(tmp_path, "Cart.pay.card", "Cart.receipt.return")
    assert repr(redaction.arguments("Cart.pay", [1, 2])) == "[[redacted], [redacted]]"
    assert redaction.arguments("Cart.other", [1, 2]) == [1, 2]
    assert repr(redaction.arguments(None, [1])) == "[[redacted]]"
    assert repr(redaction.result("Base.receipt", 1)) == REDACTED
    assert (redaction.may_apply("Cart.pay"), redaction.may_apply("Cart.count")) == (True, False)
    assert repr(redaction.arguments("Cart[key].immortal_receive", [b"rows"], ["rows"])) == "[[redacted]]"
    redaction.note_parameters("New.pay", ("item", "card"))
    assert repr(redaction.arguments("New[key].pay", [1, 2])) == "[1, [redacted]]"
    assert repr(redaction.arguments("New.pay", [1, 2])) == "[1, [redacted]]"
    redaction.note_parameters("New.pay", ("card", "item"))  # another class of that name
    assert repr(redaction.arguments("New.pay", [1, 2])) == "[[redacted], [redacted]]"


def test_texts_of_an_app(tmp_path: Path) -> None:
    use(tmp_path, "Cart.pay.card", "Cart.pay.address.street", "*.code", "Cart.receipt.return")
    shown = describe_arguments((1, "4111", object(), {"code": 5}), ("item", "card", "address", "more"), "Cart.pay")
    assert shown == "(1, [redacted], [redacted], {'code': ***})"
    assert describe_result("4111", "receipt") == REDACTED
    assert redaction.redact_call_text("charge('4111') of Cart.pay('4111')") == "charge([redacted])"
    row = Execution(1, "Cart.pay", 1, "ended", 0, 1, None, 0, 0, 0, "('4111')", "4111", None, None, None)
    assert "4111" not in str(_redacted(row).plain())


def test_a_state_of_its_class_alone(tmp_path: Path) -> None:
    use(tmp_path, "Cart.items.*.note", "Cart.seen")
    state = Fields(items={"tea": Fields(note="x", count=1)}, seen=Members([1]), count=3)
    assert to_json(redaction.redact(state, (), {"Cart", "Old"})) == {
        "items": {"tea": {"note": REDACTED, "count": 1}},
        "seen": REDACTED,
        "count": 3,
    }
    assert redaction.redact(state, (), {"Other"}) == state
    assert redaction.redact(1, ("items", "tea", "count"), {"Cart"}) == 1
    assert repr(redaction.redact("x", ("items", 3, "note"), {"Cart"})) == REDACTED


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hide = [", "Invalid value"),
        ("hide = 'Cart.pay'", "a list was expected"),
        ("hide = ['Cart']", "'Cart' came, a rule such as"),
        ("hide = [3]", "3 came, a rule such as"),
        ("show = []", "show came, hide alone was expected"),
    ],
)
def test_a_wrong_file_hides_everything(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / redaction.FILE_NAME
    file.write_text(text)
    found = redaction.read_rules(file)
    assert said in found.problem
    assert str(file) in found.problem
    redaction.set_rules(found)
    assert repr(redaction.arguments("Cart.count", [1], ["n"])) == "[[redacted]]"
    assert repr(redaction.result("x", 1)) == REDACTED
    assert to_json(redaction.redact(Fields(a=1, b=[2]), (), {"Cart"})) == {"a": REDACTED, "b": REDACTED}
    assert describe_arguments((1,), ("n",), "Cart.count") == f"({REDACTED})"


def test_the_file_stands_beside_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction.shared_registry, "chosen_home", tmp_path / "shop" / ".immortal")
    assert redaction.rules_file() == tmp_path / "shop" / "redact.toml"
    assert redaction.environment() == {}
    assert not redaction.rules()
    monkeypatch.setenv(redaction.FILE_VARIABLE, str(tmp_path / "other.toml"))
    redaction.set_rules(None)
    assert "other.toml" in redaction.rules().problem  # it is named, and is not there
    assert redaction.environment() == {redaction.FILE_VARIABLE: str(tmp_path / "other.toml")}
    monkeypatch.delenv(redaction.FILE_VARIABLE)
    monkeypatch.setattr(redaction.shared_registry, "chosen_home", "postgresql://db/home")
    redaction.set_rules(None)
    assert redaction.rules_file() is None
    assert not redaction.rules()


def test_rules_that_fit_nothing(tmp_path: Path) -> None:
    use(
        tmp_path,
        "Cart.pay.card",
        "Cart.pay.crad",
        "Crat.pay",
        "Cart.items.*.note",
        "*.whatever",
        "*.*.card",
        "Cart.pay",
    )
    known = [({"Cart"}, ["pay.card", "pay.return", "items"])]
    assert list(redaction.unmatched_rules(known)) == ["Cart.pay.crad", "Crat.pay"]
