"""Pydantic AI agents whose runs survive crashes. `docs/how-to/integrations.md`."""

from immortal.appsdk.integrations.pydantic_ai import ImmortalDurability, in_handler, run_agent, run_step

__all__ = ["ImmortalDurability", "in_handler", "run_agent", "run_step"]
