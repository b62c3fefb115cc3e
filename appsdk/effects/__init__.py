"""Effects: functions that work in the outside world, with their attempts, threads and asyncio loop."""

from immortal.appsdk.effects.effect import EffectContext, Retry, effect_context

__all__ = ["EffectContext", "Retry", "effect_context"]
