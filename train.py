"""Trains a model: the same as `dpjax train`; `--help` lists the flags."""

from dpjax.__main__ import main

if __name__ == "__main__":
  main("train")
