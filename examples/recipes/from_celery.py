"""Migration of Celery tasks: the function stays, and its retries, delays, chains and beat become plain Python.

There is no broker, and no result backend. What Celery says is in the comments. A worker that dies loses no task
(`acks_late`), and a chain goes on where it was.

immortal dev from_celery.py
immortal call mailing welcome ann@example.org --start --key welcome-ann
"""

import smtplib
from datetime import timedelta

import immortal
from immortal import Immortal, Retry, cron, rpc


def mail(to: str, text: str) -> None:  # @app.task(autoretry_for=(OSError,), retry_backoff=2, max_retries=4)
    with smtplib.SMTP("localhost", timeout=10) as server:
        server.sendmail("us@example.org", [to], text)


class Mailing(Immortal, concurrent_effects=4):  # celery worker --concurrency=4
    users: list[str]

    def __init__(self) -> None:
        self.users = []

    @rpc
    async def welcome(self, to: str) -> int:
        # chain(mail.s(to, "Welcome!"), join.si(to), mail.si(to, "Any questions?").set(countdown=86400)).delay()
        retries = immortal.effect.options(retry=Retry(attempts=5, first_wait=timedelta(seconds=2), on=(OSError,)))
        await retries(mail, to, "Welcome!")
        number = await immortal.step(self.join, to)
        await immortal.sleep(timedelta(days=1))
        await retries(mail, to, "Any questions?")
        return number  # result.get(): `start(with_key(mailing, "welcome-ann").welcome, to).result()`, from any process

    def join(self, to: str) -> int:  # a task of its own in Celery, with a database for the list
        self.users.append(to)
        return len(self.users)

    @cron("30 7 * * mon")  # beat_schedule = {"news": {"task": "news", "schedule": crontab(30, 7, day_of_week=1)}}
    async def news(self) -> None:  # group(mail.s(to, "News") for to in users).delay()
        for to in await immortal.step(lambda: self.users):
            self.send.fork(to, "News")

    @rpc
    async def send(self, to: str, text: str) -> None:  # mail.delay(to, text)
        await immortal.effect(mail, to, text)
