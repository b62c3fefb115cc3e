"""Pydantic AI agents whose runs survive crashes. `docs/how-to/integrations.md`."""

from immortal.appsdk.integrations.pydantic_ai import ImmortalDurability, run_step

__all__ = ["ImmortalDurability", "run_step"]
