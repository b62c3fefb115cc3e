"""Effects: a function that works in the outside world, with its attempts, its threads and its loop."""

from immortal.appsdk.effects.effect import EffectContext, Retry, effect_context

__all__ = ["EffectContext", "Retry", "effect_context"]
