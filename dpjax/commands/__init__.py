"""The commands of `dpjax`, one module each, with `main(words)`; `dpjax.__main__` lists them."""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:
  from dpjax import lazy

  __getattr__ = lazy.modules(__name__)
