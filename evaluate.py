"""Scores a run: the same as `dpjax evaluate`; `--help` lists the flags."""

from dpjax.commands.evaluate import main

if __name__ == "__main__":
  main()
