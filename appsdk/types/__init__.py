"""Types that MessagePack does not know: codecs that convert their values to plain ones and back."""
