"""Continues a prompt: the same as `dpjax generate`; `--help` lists the flags."""

from dpjax.__main__ import main

if __name__ == "__main__":
  main("generate")
