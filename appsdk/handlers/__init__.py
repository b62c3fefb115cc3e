"""Declarations of a class: handlers, peers, hooks, schedules; and the proxies that it gets for them."""

from immortal.appsdk.handlers.decorators import method_id_of_name

__all__ = ["method_id_of_name"]
