"""Lines for people.

12:00:01.250 info    counter  recovered  epoch=4 sequence_id=41
"""

from __future__ import annotations

import time

from immortal.coordinator.core.notices import Notice
from immortal.coordinator.notices.lines import Lines
from immortal.protocol.shown import printable, printable_json


class TextLines(Lines):
    def line(self, notice: Notice) -> str:
        now_s = time.time()
        clock = f"{time.strftime('%H:%M:%S', time.localtime(now_s))}.{int(now_s % 1 * 1000):03d}"
        line = printable(f"{clock} {notice.level:<7} {self.instance}  {notice.text}")
        values = " ".join(f"{key}={_shown(value)}" for key, value in notice.values().items() if value is not None)
        return f"{line}  {values}" if values else line


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = str(value)
    if text and text.isprintable() and not any(one in ' "=' for one in text):
        return text
    return printable_json(text)
