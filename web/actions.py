"""Actions of the page: each verb of a running coordinator, its texts, and the fields of its form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anyio import to_thread
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.operator import control
from immortal.presenters.operations import consequences, live_peers, retry_problem
from immortal.presenters.status import format_paused, format_resumed, operator_name
from immortal.protocol import decoding
from immortal.protocol.command_line import counted
from immortal.protocol.errors import ImmortalError
from immortal.protocol.system_methods import REASON_CHARACTERS_MAX
from immortal.web import WebError
from immortal.web.site import form_of, instance_page, settings_of, site_of, text_of

ANSWER_S = 30.0

Values = Mapping[str, str]


def text(name: str, given: str) -> str:
    return given


def number(name: str, given: str) -> int:
    if not (given.isascii() and given.isdecimal() and len(given) < 19):
        raise WebError(f"{name}: a number was expected, not {given[:40]!r}")
    return int(given)


def reason(name: str, given: str) -> str:
    if len(given.strip()) > REASON_CHARACTERS_MAX:
        raise WebError(f"the reason has {len(given.strip())} characters: at most {REASON_CHARACTERS_MAX} were expected")
    return given.strip()


def json(name: str, given: str) -> Any:
    given = given.strip() or "null"
    try:
        return decoding.parse_json_argument(given)
    except ValueError as error:
        raise WebError(f"{given[:60]!r} is not JSON: {error}; a text needs its own quotes") from None


class Field(Struct, frozen=True):
    """Field of an action's form. ``is_given``: the link has its value, so that nobody types it.
    ``parse``: takes the name and what was typed; raises WebError. ``key``: its name in the request, if another one."""

    name: str
    label: str
    parse: Callable[[str, str], Any] = text
    is_given: bool = False
    placeholder: str = ""
    key: str = ""


def ordered(answer: dict[str, Any]) -> str:
    said = f"{answer['text']} (record {answer['record']}:{answer['message']})"
    if not answer["done"]:
        raise WebError(said, 409)
    return said


class Action(Struct, frozen=True):
    """Action on an instance, with its form. ``done`` returns a text for the answer; raises WebError if nothing was
    done. ``arguments`` makes the verb's argument from the fields, if that is not simply what they hold."""

    verb: str
    title: str
    button: str
    what: str
    fields: tuple[Field, ...] = ()
    done: Callable[[dict[str, Any]], str] = ordered
    arguments: Callable[[Values], dict[str, Any]] | None = None

    def request(self, given: Values) -> dict[str, Any]:
        """Return the verb's argument. Raises WebError."""
        if self.arguments is not None:
            return self.arguments(given)
        return {one.key or one.name: one.parse(one.name, given.get(one.name, "")) for one in self.fields}


def do(settings: InstanceSettings, action: Action, fields: Values) -> tuple[list[str], list[str]]:
    """Request ``action`` from the coordinator; return texts of what was done, and of what failed."""
    try:
        return [action.done(ask(settings, action.verb, action.request(fields)))], []
    except ImmortalError as error:
        return [], [str(error)]


def ask(settings: InstanceSettings, verb: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request, with the user's name for most verbs, to the coordinator; return the answer.
    Raises WebError, ControlError."""
    if verb not in ("checkpoint", "reset-peer"):
        request["who"] = f"{operator_name()} by immortal web"
    answer = control.query(settings.folder, verb, ANSWER_S, argument=request)
    if "error" in answer:
        raise WebError(str(answer["error"]), 409)
    return answer


def _tried(answer: dict[str, Any]) -> str:
    if problem := retry_problem("this instance", answer):
        raise WebError(problem, 409)
    return str(answer["text"])


def _letter(fields: Values) -> dict[str, Any]:
    return {"keys": [[*(one.parse(one.name, fields.get(one.name, "")) for one in _OF_MESSAGE), 0, 0]]}


def _retried(answer: dict[str, Any]) -> str:
    refused = "".join(f"; {one} is not retried: {reason}" for one, reason in (answer.get("refused") or {}).items())
    return f"{counted(answer.get('retried', 0), 'dead letter')} retried{refused}"


def _only_if(key: str, done: str | Callable[[dict[str, Any]], str], otherwise: Callable[[dict[str, Any]], str]) -> Any:
    """Return an action's ``done``: nothing was done unless the answer has a value for ``key``."""

    def text_of_answer(answer: dict[str, Any]) -> str:
        if not answer.get(key):
            raise WebError(otherwise(answer), 409)
        return done if isinstance(done, str) else done(answer)

    return text_of_answer


_TASK = Field("task", "Handler", number, is_given=True)
_OF_MESSAGE = (
    Field("record", "Record", number, is_given=True, key="sequence_id"),
    Field("message", "Message", number, is_given=True, key="message_index"),
)

ACTIONS = {
    "checkpoint": Action(
        "checkpoint",
        "Take a checkpoint",
        "Take it",
        "The app saves its state now. A recovery or a replay can start from it.",
        done=lambda answer: "a checkpoint is requested: it is taken as soon as the app answers",
    ),
    "pause": Action(
        "pause",
        "Pause this instance",
        "Pause it",
        "The app gets no input until it is resumed. Incoming messages are logged and wait; callers wait for their "
        "answers. A restart ends the pause.",
        done=format_paused,
    ),
    "resume": Action(
        "resume",
        "Resume this instance",
        "Resume it",
        "The app handles the waiting input of its log, then new input.",
        done=format_resumed,
    ),
    "cancel": Action(
        "cancel",
        "Cancel a waiting handler",
        "Cancel it",
        "'Cancelled' is raised at the line where it waits; it cleans up and ends. Its caller gets CallCancelled.",
        (_TASK, Field("reason", "Reason, for the handler and its caller", reason)),
    ),
    "terminate": Action(
        "terminate",
        "Terminate a waiting handler",
        "Terminate it",
        "It ends at the line where it waits: no further code of it runs, not even a 'finally'. Its caller gets "
        "CallCancelled.",
        (_TASK, Field("reason", "Reason, for its caller", reason)),
    ),
    "signal": Action(
        "signal",
        "Send an event to a waiting handler",
        "Send it",
        "Like immortal.signal(event, value), but for this handler alone.",
        (
            _TASK,
            Field("event", "Event", is_given=True),
            Field("value", "Value, as JSON", json, placeholder="null"),
        ),
    ),
    "retry-effect": Action(
        "retry-effect",
        "Retry an effect",
        "Retry now",
        "Effects that this handler waits for, and that are between two attempts, are tried now. It counts as the next "
        "attempt.",
        (_TASK,),
        _tried,
    ),
    "reset-peer": Action(
        "reset-peer",
        "Reset the stream of a peer whose log was wiped or replaced",
        "Reset it",
        "The instance forgets which log the peer has.",
        (Field("peer", "Peer", is_given=True),),
        _only_if(
            "found",
            "reset: the log that the peer has at its next connection is accepted",
            lambda answer: "there was no contact with that peer yet: there is nothing to reset",
        ),
    ),
    "letters-retry": Action(
        "letters-retry",
        "Retry all dead letters",
        "Retry them",
        "Each becomes a new input in the log, and is removed from the dead letters.",
        done=_retried,
        arguments=lambda fields: {"all": True},
    ),
    "letters-drop": Action(
        "letters-drop",
        "Drop all dead letters",
        "Drop them permanently",
        "They are deleted, and cannot be retried.",
        done=lambda answer: f"{counted(answer.get('dropped', 0), 'dead letter')} dropped",
        arguments=lambda fields: {"all": True},
    ),
    "letter-retry": Action(
        "letters-retry",
        "Retry a dead letter",
        "Retry it",
        "It becomes a new input in the log, and is removed from the dead letters.",
        _OF_MESSAGE,
        _only_if("retried", _retried, _retried),
        _letter,
    ),
    "letter-drop": Action(
        "letters-drop",
        "Drop a dead letter",
        "Drop it permanently",
        "It is deleted, and cannot be retried.",
        _OF_MESSAGE,
        _only_if("dropped", "the dead letter is dropped", lambda answer: "there is no such dead letter any more"),
        _letter,
    ),
    "skip": Action(
        "skip",
        "Skip one message",
        "Skip it",
        "The call fails, and the state is as if it had never arrived. For messages that end the app each time.",
        (*_OF_MESSAGE, Field("reason", "Reason", reason)),
        _only_if("skipped", "the message is skipped", lambda answer: f"it was not skipped: {answer}"),
    ),
}


# Confirmation and execution of an action: a page that says what will happen, and a form that does it.


def routes() -> list[Route]:
    return [Route("/i/{name}/do/{action}", confirm), Route("/i/{name}/do/{action}", act, methods=["POST"])]


def require_actions(request: Request, actions: Mapping[str, Action], key: str) -> Action:
    """Return the action that the path names. Raises WebError if it does not exist, or actions are not allowed."""
    if not site_of(request).allow_actions:
        raise WebError("this page is read-only: 'immortal web --allow-actions' allows actions", 403)
    found = actions.get(request.path_params[key])
    if found is None:
        raise WebError(f"there is no action {request.path_params[key][:40]!r}", 404)
    return found


def confirm(request: Request) -> Response:
    action, settings = require_actions(request, ACTIONS, "action"), settings_of(request)
    given = {field.name: text_of(request, field.name) for field in action.fields if field.is_given}
    for name, value in given.items():
        if not value:
            raise WebError(f"{name}= is missing")
    return instance_page(
        request,
        "action.html",
        "overview",
        action=action,
        target=f"do/{request.path_params['action']}",
        given=given,
        warnings=_warnings(action, settings, given.get("peer", "")),
        preview=[],
        preview_more=0,
    )


def _warnings(action: Action, settings: InstanceSettings, peer: str) -> list[str]:
    if action.verb != "reset-peer":
        return []
    known = (live_peers(settings) or {}).get(peer)
    return [] if known is None else list(consequences(settings.name, peer, known))


async def act(request: Request) -> Response:
    return await carry_out(request, ACTIONS, "action", "overview", do)


async def carry_out(
    request: Request,
    actions: Mapping[str, Action],
    key: str,
    tab: str,
    do: Callable[[InstanceSettings, Action, Values], tuple[list[str], list[str]]],
) -> Response:
    """Carry out the action of a form by ``do``, and show the texts that ``do`` returns on done and failed parts."""
    action, settings = require_actions(request, actions, key), settings_of(request)
    form = await form_of(request)
    said, problems = await to_thread.run_sync(lambda: do(settings, action, form))
    status, texts = 409 if problems else 200, {"said": "\n".join(said), "problem": "\n".join(problems)}
    return instance_page(request, "done.html", tab, status, action=action, **texts)
