"""Nightly report: every night at two, in local time, the sales since the last report are mailed.

Use it for what runs by the calendar. A night that the service slept through is made up for, once, when it is back. No
clock that jumps, ahead or back, loses or doubles a sale: a report has all that the one before did not have, whatever
the date says. The mail has one Message-ID in all attempts, by which a mail server drops the second of a pair.

immortal dev nightly_report.py
immortal call sales sell tea 250
"""

import smtplib
from datetime import datetime
from email.message import EmailMessage

import immortal
from immortal import Immortal, cron, effect_context, rpc


def mail(until: datetime, cents: dict[str, int]) -> None:
    message = EmailMessage()
    message["Message-ID"] = f"<{effect_context().key}@example.org>"
    message["From"], message["To"] = "shop@example.org", "boss@example.org"
    message["Subject"] = f"Sales until {until:%A, %H:%M}"
    message.set_content("\n".join(f"{item}: {total:,} cents" for item, total in sorted(cents.items())))
    with smtplib.SMTP("localhost", timeout=10) as server:
        server.send_message(message)


class Sales(Immortal):
    cents: dict[str, int]  # by item, since the last report

    def __init__(self) -> None:
        self.cents = {}

    @rpc
    def sell(self, item: str, cents: int) -> None:
        self.cents[item] = self.cents.get(item, 0) + cents

    @cron("0 2 * * *", tz="Europe/Berlin")
    async def report(self) -> None:
        until = immortal.now()
        if cents := await immortal.step(self.close):
            await immortal.effect(mail, until, cents)  # tried again until the mail server takes it

    def close(self) -> dict[str, int]:
        """Return the sales, and begin anew: one step, so each sale is before or behind it."""
        cents, self.cents = self.cents, {}
        return cents
