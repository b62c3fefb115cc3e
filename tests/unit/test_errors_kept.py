"""Errors of ours in a state: each is copied and pickled, whatever its constructor takes."""

from __future__ import annotations

import copy
import pickle

import pytest

from immortal.client import CallRaised
from immortal.errors import CallCancelled, CalleeFailed, EffectFailed, HandlerError, UpgradeError, UsageError
from immortal.protocol.errors import LimitExceededError

ERRORS = [
    CalleeFailed("Bank.add", "ValueError", "no such account", "bank record 3:0"),
    CallCancelled("Bank.add", "too late"),
    CallRaised("Bank.add", "Overdrawn", [3], {"missing": 3}),
    EffectFailed("fetch", "OSError", "no route", "Traceback ...", 3),
    HandlerError("can't", 7, 1),
    LimitExceededError("a frame", 9, 8),
    UpgradeError("can't", "because"),
    UsageError("not here"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_it_comes_back_as_it_was(error: Exception, again: object) -> None:
    assert callable(again)
    found = again(error)
    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))
