"""What a schema says about its settings, one by one: for the reader and the writer, the command line and the docs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from msgspec import NODEFAULT, Meta, Struct, convert, structs, to_builtins

from immortal.coordinator.config.values import WrongValueError


class Setting(Struct, frozen=True, kw_only=True):
    """``type``: without None. ``about``: what :mod:`coordinator.config.values` lists. ``least``, ``most``: of a number.

    ``default`` is NODEFAULT where a file has to say it, or where it is worked out.
    """

    name: str
    type: Any
    text: str
    about: Mapping[str, Any]
    checks: tuple[Meta, ...]  # of msgspec
    least: int | None
    most: int | None
    default: Any

    @property
    def is_required(self) -> bool:
        return self.default is NODEFAULT and "default" not in self.about

    @property
    def schema(self) -> type[Struct] | None:
        """Of a table of settings of its own."""
        is_one = isinstance(self.type, type) and issubclass(self.type, Struct) and "read" not in self.about
        return self.type if is_one else None

    @property
    def is_table(self) -> bool:
        """Of settings of its own, or of names."""
        return get_origin(self.type) is Mapping or self.schema is not None

    @property
    def is_single(self) -> bool:
        """One value, which an option can give."""
        return not self.is_table and "table" not in self.about

    @property
    def default_text(self) -> str:
        """The default as it stands in a file, or what is so without the setting."""
        text = str(self.about.get("default", self.in_file(self.default)))
        return text.lower() if self.type is bool or self.default is None else text

    @property
    def of_each(self) -> Setting:
        """What holds for each name of a table of names."""
        return setting_of(get_args(self.type)[1])

    @property
    def expected(self) -> str:
        """What its value must be, in words."""
        text = self.about.get("expected")
        if text is None and self.type is int:
            text = f"a whole number from {self.least} to {self.most}"
        elif text is None and self.type is bool:
            text = "true or false"
        elif text is None:
            *others, last = (f'"{choice}"' for choice in self.type)
            text = f"{', '.join(others)} or {last}"
        return f'{text}, or "{self.about["none"]}"' if "none" in self.about else text

    def value_of(self, value: object) -> Any:
        """What ``value`` of a file means. Raises WrongValueError."""
        if "none" in self.about and value == self.about["none"]:
            return None
        read = self.about.get("read")
        try:
            return read(value) if read else convert(value, Annotated[(self.type, *self.checks)])
        except ValueError as error:  # that of msgspec is one
            own = str(error) if isinstance(error, WrongValueError) else ""
            raise WrongValueError(own or self.expected) from None

    def in_file(self, value: object) -> Any:
        """As ``value`` stands in a file; None: it does not."""
        return self.about.get("none") if value is None else _plain(to_builtins(value, enc_hook=str))


def _plain(value: object) -> object:
    """With lists where there are tuples: a file knows those alone."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def setting_of(type_: Any, name: str = "", default: Any = NODEFAULT) -> Setting:
    """What ``type_`` says: a type, which may be annotated, or that or None."""
    metas: list[Meta] = []
    while get_origin(type_) is Annotated or NoneType in get_args(type_):
        if get_origin(type_) is Annotated:
            metas += type_.__metadata__
            type_ = type_.__origin__
        else:
            (type_,) = (choice for choice in get_args(type_) if choice is not NoneType)
    return Setting(
        name=name,
        type=type_,
        text=next((meta.description for meta in metas if meta.description), ""),
        about={key: value for meta in reversed(metas) for key, value in (meta.extra or {}).items()},
        checks=tuple(metas),
        least=next((int(meta.ge) for meta in metas if meta.ge is not None), None),
        most=next((int(meta.le) for meta in metas if meta.le is not None), None),
        default=default,
    )


@functools.cache
def settings_of(schema: type[Struct]) -> Mapping[str, Setting]:
    """The settings of ``schema`` by name, in its order."""
    found = {}
    for field in structs.fields(schema):
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        setting = setting_of(field.type, field.name, default)
        if setting.text:
            found[field.name] = setting
    return found
