"""The differences of two trees are none exactly when they are the same."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from immortal.appsdk.state.tree import ABSENT, Difference, Fields, Members, canonical, differences, to_json, tree

SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text("ab$", max_size=2) | st.binary(max_size=2)
)
HASHABLE = SCALARS | st.tuples(st.integers(0, 2), st.text("ab", max_size=1))
VALUES = st.recursive(
    SCALARS | st.frozensets(HASHABLE, max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=4),
    max_leaves=12,
)


def same(old: Any, new: Any) -> bool:
    """Slowly, and in no way as the code does it."""
    if type(old) is not type(new):
        return False
    if isinstance(old, Members):
        return sorted(map(canonical, old)) == sorted(map(canonical, new))
    if isinstance(old, dict):
        return sorted(map(repr, old)) == sorted(map(repr, new)) and all(
            same(part, new[other]) for key, part in old.items() for other in new if repr(key) == repr(other)
        )
    if isinstance(old, list):
        return len(old) == len(new) and all(map(same, old, new))
    return repr(old) == repr(new)


def key(difference: Difference) -> str:
    return json.dumps(difference.to_json(), sort_keys=True)


def mirrored(difference: Difference) -> Difference:
    return Difference(difference.path, difference.new, difference.old)


@given(VALUES, VALUES)
def test_none_exactly_when_they_are_the_same(old: Any, new: Any) -> None:
    old_tree, new_tree = tree(old), tree(new)
    found = list(differences(old_tree, new_tree))
    assert (not found) == same(old_tree, new_tree)
    assert sorted(map(key, map(mirrored, differences(new_tree, old_tree)))) == sorted(map(key, found))
    for difference in found:
        assert difference.old is not ABSENT or difference.new is not ABSENT
        assert not same(difference.old, difference.new)


@given(VALUES)
def test_a_tree_is_the_same_for_the_same_value_and_fits_json(value: Any) -> None:
    assert list(differences(tree(value), tree(value))) == []
    json.dumps(to_json(tree(value)), allow_nan=False)


@given(st.dictionaries(st.sampled_from("abcd"), VALUES), st.sampled_from("abcd"), VALUES)
def test_one_change_is_one_path(state: dict[str, Any], name: str, value: Any) -> None:
    """Every path begins with the attribute that was changed."""
    old = Fields({other: tree(item) for other, item in state.items()})
    new = Fields({**old, name: tree(value)})
    found = list(differences(old, new))
    assert all(difference.path.startswith(name) for difference in found)
    assert bool(found) == (name not in old or not same(old[name], new[name]))


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_differences_of_a_list_turn_the_old_one_into_the_new_one(old: list[int], new: list[int]) -> None:
    """Going through the paths: an old item is taken out, a new one put in."""
    items: list[Any] = [[item] for item in old]
    added = []
    for difference in differences(old, new):
        index = int(difference.path[1:-1])
        if difference.old is ABSENT:
            added.append((index, difference.new))
        else:
            assert items[index] == [difference.old]
            items[index] = [] if difference.new is ABSENT else [difference.new]
    flat = [item for part in items for item in part]
    for index, item in added:
        flat.insert(index, item)
    assert flat == new
