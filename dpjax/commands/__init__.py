"""The commands of `dpjax`, one module each."""
