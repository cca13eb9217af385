"""Implementations that no target hardware has measured yet; `dpjax.ops` chooses them by name."""
