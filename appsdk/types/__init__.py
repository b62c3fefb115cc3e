"""Types that MessagePack does not know: converts their values to plain ones and back."""
