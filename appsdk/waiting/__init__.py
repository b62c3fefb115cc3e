"""``async def`` handlers: what they wait for, and how each is run again over its journal."""
