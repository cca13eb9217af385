"""Implementations not yet measured on their hardware; `dpjax.ops` selects them by name."""
