"""Declarations in a class: handlers, peers, hooks, schedules; and the proxies that stand for peers and handlers."""

from immortal.appsdk.handlers.decorators import method_id_of_name

__all__ = ["method_id_of_name"]
