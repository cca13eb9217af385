"""The commands of `dpjax`, a module each."""
