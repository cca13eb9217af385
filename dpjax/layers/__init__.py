"""Parameters round the pure functions of `dpjax.ops`."""
