"""Types that MessagePack does not know: how their values become plain ones, and values again."""
