"""The commands of `dpjax`, one module each, with `main(words)`; `dpjax.__main__` lists them."""
