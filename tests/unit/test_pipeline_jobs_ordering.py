"""The audit of ordered multicasts: over logs of real instances, sound ones and such with a planted violation."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from immortal.pipeline.jobs.audit import audit_rows
from immortal.pipeline.jobs.evidence import evidence_of_record
from immortal.pipeline.jobs.ordering import ORDERED, OrderingAudit
from immortal.pipeline.jobs.stream_audit import Result, Violation
from immortal.replay.plan import RecordedLog
from immortal.testing import Environment
from tests.helpers.ordering_runs import NAMES, Member

Word = list[object]  # at, kind, sender, number, timestamp, count
Words = list[tuple[str, str, int, int, Word]]  # source, log, record, batch


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """What the logs of four instances say that multicast to each other, all at the same time."""
    folder = tmp_path_factory.mktemp("ordered")
    rng = random.Random(7)
    with Environment(order=3, seed=3) as env:
        members = {name: env.start(Member, name) for name in NAMES}
        for number in range(40):
            to = ",".join(rng.sample(NAMES, rng.choice((2, 3))))
            more = [f"{number}:run:{','.join(rng.sample(NAMES, 2))}"] if number % 2 else []
            members[rng.choice(NAMES)].send(Member.begin, [f"{number}:run:{to}", *more])
            if number % 4 == 0:
                env.run()
        env.run()
        return list(_words(members_results(members, folder)))


def members_results(members: dict[str, object], folder: Path) -> Iterator[Result]:
    rows = []
    for name, member in members.items():
        member.export_log(folder / name)  # type: ignore[attr-defined]
        recorded = RecordedLog.read(folder / name)
        for sequence_id, value in enumerate(recorded.values(0)):
            rows += evidence_of_record(name, sequence_id, value, recorded.identity.committer_id)
    rows.sort(key=lambda row: (row.sender, row.receiver, row.what, row.sequence_id, row.batch))
    return audit_rows(rows)


def _words(results: Iterator[Result]) -> Iterator[tuple[str, str, int, int, Word]]:
    for what, sender, receiver, record, batch, body in results:
        if what == ORDERED:
            for word in json.loads(body):
                yield sender, receiver, record, batch, word


def judge(words: Words) -> tuple[OrderingAudit, list[Violation]]:
    audit = OrderingAudit()
    for source, log, record, batch, word in words:
        audit.add(source, log, record, batch, json.dumps([word]))
    return audit, list(audit.violations({}))


def changed(words: Words, change: Callable[[Word], Word | None], wanted: Callable[[str, Word], bool]) -> Words:
    """The first word of that kind is another one, or gone."""
    found: Words = []
    is_done = False
    for source, log, record, batch, word in words:
        new: Word | None = word
        if not is_done and wanted(log, word):
            new, is_done = change(list(word)), True
        if new is not None:
            found.append((source, log, record, batch, new))
    assert is_done
    return found


def test_sound_logs_have_no_violations(words: Words) -> None:
    audit, violations = judge(words)
    assert violations == []
    assert sum(word.kind == "executed" for log in audit._facts.values() for word in log) > 100
    assert len({log for _, log, _, _, _ in words}) == 4


def test_a_run_in_two_places_is_found(words: Words) -> None:
    def later(word: Word) -> Word:
        return [*word[:4], int(str(word[4])) + 1000, *word[5:]]

    _, violations = judge(changed(words, later, lambda log, word: word[1] == "executed"))
    assert any("they may see it in another order" in one.text for one in violations)
    assert {one.kind for one in violations} >= {"order"}


def test_a_run_with_other_calls_is_found(words: Words) -> None:
    def fewer(word: Word) -> Word:
        return [*word[:5], 0]

    _, violations = judge(changed(words, fewer, lambda log, word: word[1] == "executed"))
    assert {one.kind for one in violations} == {"order"}
    assert all(" calls at " in one.text for one in violations)


def test_two_runs_the_wrong_way_round_are_found(words: Words) -> None:
    """At one instance alone: each run has its place, and they were executed in another order."""
    executed = [index for index, one in enumerate(words) if one[1] == "m1" and one[4][1] == "executed"]
    executed.sort(key=lambda index: (words[index][2], words[index][3], str(words[index][4][0])))
    first, second = executed[4], executed[5]
    swapped = list(words)
    swapped[first] = (*words[first][:4], [words[first][4][0], *words[second][4][1:]])
    swapped[second] = (*words[second][:4], [words[second][4][0], *words[first][4][1:]])
    _, violations = judge(swapped)
    assert [(one.kind, one.receiver) for one in violations] == [("order", "m1")]
    assert "'m1' executed run" in violations[0].text


def test_a_run_that_was_not_sent_here_is_found(words: Words) -> None:
    _, violations = judge(changed(words, lambda word: None, lambda log, word: word[1] == "proposed here"))
    assert [one.kind for one in violations] == ["invented"]
    assert "which was not sent to it" in violations[0].text


def test_an_effect_before_its_cause_is_found(words: Words) -> None:
    """A sender's last run has the place of its first: it had executed much before it sent that."""
    numbers = [int(str(word[3])) for _, _, _, _, word in words if word[1] == "executed" and word[2] == "m0"]
    last = max(numbers)
    assert last > 12, "some runs behind those that are on their way at a time"
    moved = [
        (source, log, record, batch, [*word[:4], 1, *word[5:]] if word[1:4] == ["executed", "m0", last] else word)
        for source, log, record, batch, word in words
    ]
    _, violations = judge(moved)
    texts = [one.text for one in violations if one.kind == "causality"]
    assert any("which was sent before it" in text for text in texts)
    assert any("which 'm0' had executed" in text for text in texts)
