"""Codec of paths, which are encoded as text."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from immortal.appsdk.types.registry import Codec, describe_received


def codec_of(cls: type) -> Codec | None:
    return _PATH if cls.__module__.partition(".")[0] == "pathlib" and issubclass(cls, PurePath) else None


def _decode(annotation: Any, plain: Any) -> PurePath:
    if not isinstance(plain, str):
        raise ValueError(f"Expected `{annotation.__name__}` (a text), got {describe_received(plain)}")
    path: PurePath = annotation(plain)
    return path


_PATH = Codec(str, _decode)
