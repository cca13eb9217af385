"""Trains a model: the same as `dpjax train`; `--help` lists the flags."""

from dpjax.commands.train import main

if __name__ == "__main__":
  main()
