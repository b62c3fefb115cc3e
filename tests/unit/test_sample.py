"""Samples of a recorded fleet: which inputs they have, what comes from the record, redaction, and refusals."""

from __future__ import annotations

import asyncio
import itertools
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import immortal
from immortal import Immortal, Impulses, every, impulse, on_primary, peer, rpc, upgrades
from immortal.appsdk.testing.recorded_inputs import Given, Input, Redaction, Result, Results
from immortal.appsdk.testing.sample import _is_in_share
from immortal.cli import main
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.interfaces import LogSummary
from immortal.log import LogReader
from immortal.protocol.client_frames import ClientFrame, ClientFrameType, encode_request
from immortal.replay.fleet.opening import opened_fleet
from immortal.replay.fleet.player import logged
from immortal.replay.plan import ReplayError
from immortal.testing import Environment, Instance, assert_fleet_unchanged, sample_fleet
from tests.helpers.homes import states, write_home

MARK = "Zaphod"


class CardRefused(Exception):  # noqa: N818 (what happened)
    pass


def charge(customer: str, cents: int) -> str:
    if cents > 500:
        raise CardRefused(f"the card of {customer}")
    return f"receipt of {customer}"


class Rates(Immortal):
    """Has no log in the home: it stands for a service in another language."""

    @rpc(raises=[KeyError])
    async def rate(self, item: str) -> int:
        await immortal.sleep(timedelta(seconds=2))
        return {"tea": 3, "rice": 2}[item]


class Stock(Immortal):
    left: dict[str, int]
    takers: list[str]

    def __init__(self) -> None:
        self.left = {}
        self.takers = []

    @impulse
    def fill(self, item: str, count: int) -> None:
        self.left[item] = self.left.get(item, 0) + count

    @rpc
    def take(self, item: str, customer: str) -> int:
        self.left[item] -= 1
        self.takers.append(customer)
        return self.left[item]


class Shop(Immortal):
    stock = peer(Stock, "stock")
    rates = peer(Rates, "rates")
    lines: list[str]
    ticks: int
    seen: Any

    def __init__(self) -> None:
        self.lines = []
        self.ticks = 0
        self.seen = immortal.now()

    @rpc
    async def order(self, customer: str, item: str, cents: int) -> str:
        try:
            receipt = await immortal.effect.options(raises=[CardRefused])(charge, customer, cents)
        except CardRefused as error:
            receipt = f"no: {error}"
        try:
            rate = await self.rates.rate(item)
        except KeyError:
            rate = 0
        left = await self.stock.take(item, customer) if rate else 0
        await immortal.step(self.note, f"{customer} {item} {receipt} {rate} {left}")
        return receipt

    @rpc
    def note(self, line: str) -> None:
        self.lines.append(line)

    @every(timedelta(minutes=1))
    def tick(self) -> None:
        self.ticks += 1
        self.seen = immortal.now()

    @on_primary
    def fill(self, impulses: Impulses) -> None:
        impulses.stock.fill("tea", 10)
        impulses.stock.fill("rice", 20)


@upgrades(Stock)
class FairStock(Stock):
    @impulse
    def fill(self, item: str, count: int) -> None:
        super().fill(item, min(count, 5))


class Porter(Immortal):
    stock = peer(Stock, "stock")

    @impulse
    def fetch(self, customer: str) -> None:
        self.stock.take.fork("tea", customer)


NAMES = {"stock": f"{__name__}:Stock", "shop": f"{__name__}:Shop"}
CUSTOMERS = (MARK, "Ford", "Arthur", "Marvin", "Tricia", "Slartibartfast")


def ask(env: Environment, name: str, client: str, number: int, method: Any, *arguments: Any) -> None:
    """Let a client make a request; nothing runs before the environment does."""
    payload = encode_request(method.method_id, msgspec.msgpack.encode(arguments))
    frame = ClientFrame(ClientFrameType.REQUEST, client, name, number=number, count=1, payload=payload)
    env._world.nodes[name].handle(ev.ClientFrameReceived(None, frame))


class Recorded:
    """Home of a shop and its stock: 12 orders of clients in some minutes, of which some fail."""

    def __init__(self, folder: Path) -> None:
        self.env = env = Environment(fail_alone=True)
        env.start(Rates, "rates")
        self.stock: Instance[Stock] = env.start(Stock, "stock")
        self.shop: Instance[Shop] = env.start(Shop, "shop", effects={charge: slowly(charge)})
        self.shop.run_hook(Shop.fill)
        for number, customer in enumerate(CUSTOMERS * 2, 1):
            item, cents = ("tea", "rice", "salt")[number % 3], 100 * number
            client = f"of {customer}"
            ask(env, "shop", client, (number + 5) // 6, Shop.order, customer, item, cents)
            env.advance(seconds=7 * (number % 4))
        env.skip(hours=1)
        env.advance(minutes=2)
        assert self.shop.state.ticks < 10
        self.home = write_home(env, folder, NAMES)


def slowly(function: Any) -> Any:
    async def run(*arguments: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments)

    return run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("recorded") / "home")


def test_all_inputs_give_the_same_states_and_times(recorded: Recorded, tmp_path: Path) -> None:
    made = sample_fleet(recorded.home, tmp_path / "golden")
    assert [(one.name, one.inputs, one.inputs_then) for one in made.services] == [("shop", 12, 12), ("stock", 2, 2)]
    assert [one.messages for one in made.services] == [one.messages_then for one in made.services]
    assert (made.notes, made.left) == ([], [])
    then, now = states(recorded.home), states(tmp_path / "golden")
    assert now == then
    assert now["shop"]["ticks"] == 5  # no timer went off in the hour that the clock jumped over
    outcome = assert_fleet_unchanged(tmp_path / "golden", at_least=20)
    assert {one.name for one in outcome.services} == {"shop", "stock"}


def test_a_share_of_keys_has_all_inputs_of_each_key_and_is_always_the_same(recorded: Recorded, tmp_path: Path) -> None:
    made = [sample_fleet(recorded.home, tmp_path / name, share=0.5, keys=["customer"]) for name in ("one", "two")]
    assert made[0] == made[1]
    found = states(tmp_path / "one")
    customers = [line.split()[0] for line in found["shop"]["lines"]]
    assert sorted(customers) == sorted([MARK, "Arthur", "Marvin"] * 2)
    assert made[0].services[1].inputs == 2  # the hook's, which have no customer
    assert found["stock"]["left"] == {"tea": 8, "rice": 16}


def test_a_share_without_a_key_takes_each_input_alone(recorded: Recorded, tmp_path: Path) -> None:
    made = sample_fleet(recorded.home, tmp_path / "golden", share=0.5)
    assert 0 < sum(one.inputs for one in made.services) < 14


def test_a_function_keeps_inputs_and_a_part_of_the_time_begins_with_new_services(
    recorded: Recorded, tmp_path: Path
) -> None:
    seen: list[Input] = []

    def keep(one: Input) -> bool:
        seen.append(one)
        return one.arguments.get("item") != "tea"

    sample_fleet(recorded.home, tmp_path / "golden", keep=keep)
    assert {line.split()[1] for line in states(tmp_path / "golden")["shop"]["lines"]} == {"rice", "salt"}
    fill = next(one for one in seen if one.service == "stock")
    assert (fill.kind, fill.method, fill.arguments) == ("impulse", "Stock.fill", {"item": "tea", "count": 10})
    second, sixth = [one for one in seen if one.kind == "request"][1:6:4]
    assert (sixth.method, sixth.arguments["cents"], sixth.time.year) == ("Shop.order", 600, 2030)
    late = sample_fleet(recorded.home, tmp_path / "late", begin_ns=second.time_ns)
    assert (late.begin_ns, [one.inputs for one in late.services]) == (second.time_ns, [11, 0])
    assert states(tmp_path / "late")["stock"] == {"left": {}, "takers": []}  # nobody has filled it
    to_ns = second.time_ns - 6_000_000_000  # the call to the service without a log is answered later
    early = sample_fleet(recorded.home, tmp_path / "early", to_ns=to_ns)
    assert [one.inputs for one in early.services] == [1, 2]
    assert early.notes == ["1 effects or calls have no result up to the end: their handlers wait"]


def hide(one: Input) -> dict[str, Any]:
    return {name: hidden(value) for name, value in one.arguments.items()}


def hidden(value: Any) -> Any:
    if isinstance(value, list):
        return [hidden(one) for one in value]
    return value.replace(MARK, "Somebody") if isinstance(value, str) else value


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_what_is_redacted_is_nowhere_in_the_new_home(recorded: Recorded, tmp_path: Path) -> None:
    (recorded.home / "shop" / "keys").mkdir(exist_ok=True)
    (recorded.home / "shop" / "keys" / "secret").write_text("the key")
    made = sample_fleet(recorded.home, tmp_path / "golden", redact=hide)
    assert made.left == []
    data = contents(tmp_path / "golden")
    assert MARK.encode() in contents(recorded.home)
    assert MARK.encode() not in data
    assert b"of Ford" not in data.replace(b"receipt of Ford", b"").replace(b"the card of Ford", b"")  # a client's ID
    assert not list((tmp_path / "golden").rglob("keys"))
    lines = states(tmp_path / "golden")["shop"]["lines"]
    assert [line for line in lines if "Somebody" in line] == [
        "Somebody rice receipt of Somebody 2 19",
        "Somebody rice no: the card of Somebody 2 17",
    ]


def test_what_is_there_although_it_was_to_be_redacted_is_said(recorded: Recorded, tmp_path: Path) -> None:
    made = sample_fleet(
        recorded.home, tmp_path / "golden", redact=lambda one: one.arguments if one.kind == "result" else hide(one)
    )
    assert made.left == [f"shop: {MARK}"]


def test_the_command_says_what_it_made_and_fails_where_a_text_is_left(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    (tmp_path / "loud.py").write_text(f"from {__name__} import inputs_only\nprint('loaded')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    redact = "--redact", "loud:inputs_only"
    golden = str(tmp_path / "golden")
    result = CliRunner().invoke(main, ["--home", str(recorded.home), "sample", golden, *redact, "--json"])
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["left"] == [f"shop: {MARK}"]
    assert f"not redacted: shop: {MARK}" in result.stderr
    verified = CliRunner().invoke(main, ["--home", golden, "verify", "shop"])
    assert verified.exit_code == 0, verified.output
    for wrong, why in (
        (["--share", "0%"], "a percentage was expected"),
        (["--key", "customer"], "--key needs --share"),
        (["--keep", "function"], "as module:function"),
    ):
        refused = CliRunner().invoke(main, ["--home", "h", "sample", str(tmp_path / "new"), *wrong])
        assert (refused.exit_code, why in refused.stderr) == (2, True), refused.stderr


def inputs_only(one: Input) -> dict[str, Any]:
    return one.arguments if one.kind == "result" else hide(one)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"keep": lambda one: False}, "none of 14 inputs is kept"),
        ({"share": 0.5, "keys": ["custumer"]}, "--key custumer: no input has such an argument; there are .*customer"),
        ({"keep": lambda one: one.arguments["phone"]}, "--keep fails for .*: KeyError: 'phone'"),
        ({"begin_ns": 1 << 62}, "the logs have no input from outside in that time"),
        ({"to_ns": 1}, "no log has a record up to that time"),
        ({"redact": lambda one: {}}, r"--redact fails for .*: it returned the arguments \[\], and"),
        ({"redact": lambda one: one.arguments["phone"]}, "--redact fails for .*: KeyError: 'phone'"),
    ],
)
def test_what_can_not_be_made_is_said(recorded: Recorded, tmp_path: Path, options: Any, why: str) -> None:
    with pytest.raises(ReplayError, match=why):
        sample_fleet(recorded.home, tmp_path / "golden", **options)
    assert not (tmp_path / "golden").exists()


def test_a_folder_that_is_there_and_one_without_services_are_refused(recorded: Recorded, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="is there already"):
        sample_fleet(recorded.home, tmp_path)
    with pytest.raises(ReplayError, match="a registry folder was expected"):
        sample_fleet(tmp_path, tmp_path / "golden")


def test_of_a_trimmed_log_it_has_what_came_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = Environment()
    stock: Instance[Stock] = env.start(Stock, "stock")
    for item in ("tea", "rice"):
        stock.send(Stock.fill, item, 10)
        env.advance(seconds=1)
        stock.checkpoint()
    home = write_home(env, tmp_path / "home", {"stock": NAMES["stock"]})
    whole = LogReader.summary

    def trimmed(reader: LogReader) -> LogSummary:
        summary = whole(reader)
        if reader.where.startswith(f"lmdb:{tmp_path / 'home'}") or str(tmp_path / "home") in reader.where:
            headers = summary.checkpoints[1:]
            return replace(summary, checkpoints=headers, first_sequence_id=headers[0].sequence_id + 1)
        return summary

    monkeypatch.setattr(LogReader, "summary", trimmed)
    made = sample_fleet(home, tmp_path / "golden")
    assert [note[:20] for note in made.notes] == ["logs were trimmed: i"]
    assert states(tmp_path / "golden")["stock"]["left"] == {"rice": 10}


def test_a_client_of_which_some_requests_are_left_out_is_never_forgotten(tmp_path: Path) -> None:
    env = Environment()
    stock: Instance[Stock] = env.start(Stock, "stock")
    stock.send(Stock.fill, "tea", 100)
    env.run()
    for number in range(1, 6):
        for client in ("one", "other"):
            ask(env, "stock", client, number, Stock.take, "tea", f"{client} {number}")
            env.skip(hours=10)
    home = write_home(env, tmp_path / "home", {"stock": NAMES["stock"]})
    takers = ["one 1", "other 3", "one 5", "other 5"]
    sample_fleet(home, tmp_path / "golden", keep=lambda one: one.arguments.get("customer", "one 1") in takers)
    assert states(tmp_path / "golden")["stock"] == {"left": {"tea": 96}, "takers": takers}


def test_a_message_that_was_late_is_late(tmp_path: Path) -> None:
    env = Environment()
    stock: Instance[Stock] = env.start(Stock, "stock")
    stock.send(Stock.fill, "tea", 9)
    slow, fast = (env.start(Porter, name) for name in ("slow", "fast"))
    slow.send(Porter.fetch, "first")
    env.partition(slow, stock)
    for porter, customer in ((slow, "second"), (slow, "third"), (fast, "fourth")):
        porter.send(Porter.fetch, customer)
        env.advance(minutes=1)
    env.heal()
    porters = dict.fromkeys(("slow", "fast"), f"{__name__}:Porter")
    home = write_home(env, tmp_path / "home", {"stock": NAMES["stock"], **porters})
    sample_fleet(home, tmp_path / "golden", keep=lambda one: one.arguments.get("customer") != "second")
    assert states(home)["stock"]["takers"] == ["fourth", "first", "second", "third"]
    assert states(tmp_path / "golden")["stock"]["takers"] == ["fourth", "first", "third"]


def test_todays_class_handles_all_of_the_sample(tmp_path: Path) -> None:
    env = Environment()
    stock: Instance[Stock] = env.start(Stock, "stock")
    stock.send(Stock.fill, "tea", 9)
    env.advance(seconds=1)
    stock.upgrade(FairStock).send(FairStock.fill, "rice", 9)
    env.advance(seconds=1)
    home = write_home(env, tmp_path / "home", {"stock": f"{__name__}:FairStock"})
    made = sample_fleet(home, tmp_path / "golden")
    assert made.notes == ["stock: earlier versions handled a part then; today's class handles all of the sample"]
    assert states(home)["stock"]["left"] == {"tea": 9, "rice": 5}
    assert states(tmp_path / "golden")["stock"]["left"] == {"tea": 5, "rice": 5}


def test_a_service_that_began_later_begins_later(tmp_path: Path) -> None:
    env = Environment()
    stock: Instance[Stock] = env.start(Stock, "stock")
    stock.send(Stock.fill, "tea", 1)
    env.advance(days=1)
    env.start(Shop, "shop")
    home = write_home(env, tmp_path / "home", NAMES)
    times: list[int] = []
    sample_fleet(home, tmp_path / "golden", keep=lambda one: [times.append(one.time_ns)])
    assert states(tmp_path / "golden") == states(home)
    with opened_fleet(tmp_path / "golden", trust_pickle=False) as opened:
        reader = opened.readers["stock"]
        records = list(logged(reader, reader.summary().checkpoints[0], None))
    assert [one.time_ns for one in records[1:]] == times


def test_a_result_is_that_of_equal_arguments_nearest_in_time() -> None:
    results = Results(Redaction(None), 130)
    for at, (requested_ns, encoded) in enumerate(((10, b"a"), (20, b"a"), (20, b"a"), (21, b"b"))):
        results.add(("shop", "charge"), encoded, Result("shop", "charge", requested_ns, at, False, []))
    results.sort()
    what = "shop", "charge"
    found = [results.match(what, b"a", now_ns) for now_ns in (0, 14, 19, 99, 99)]
    assert [one.requested_ns for one in found if one is not None] == [10, 10, 20, 20, 20]
    assert [one.delay_ns for one in found[2:4] if one is not None] == [1, 2]
    assert results.guessed == 0
    assert results.match(what, b"a", 129) is None  # it would come after the end
    other = results.match(what, b"c", 21)
    assert other is not None
    assert other.requested_ns == 21
    assert (results.guessed, results.match(("shop", "refund"), b"a", 0), results.missing) == (1, None, 2)


def test_a_value_that_is_redacted_in_place_is_redacted() -> None:
    def move(one: Input) -> dict[str, Any]:
        one.arguments["address"]["street"] = "Nowhere"
        return one.arguments

    redaction, address = Redaction(move), {"street": MARK}
    raws = [msgspec.Raw(msgspec.msgpack.encode(address))]
    (encoded,) = redaction.encoded(Input("shop", "request", "Shop.move", {"address": address}, 0), raws)
    assert msgspec.msgpack.decode(encoded) == {"street": "Nowhere"}
    assert redaction.replaced == {MARK}


def test_a_value_that_is_kept_is_so_beside_any_other_key() -> None:
    def is_kept(**arguments: str) -> bool:
        one: Any = None
        given = Given(Input("bank", "request", "Bank.move", arguments, 0), 1, "", one, [], 0)
        return _is_in_share(given, 0.5, ("source", "target"))

    kept = {name: is_kept(source=name) for name in CUSTOMERS}
    assert set(kept.values()) == {True, False}
    for source, target in itertools.product(CUSTOMERS, repeat=2):
        assert is_kept(source=source, target=target) == (kept[source] or kept[target])
