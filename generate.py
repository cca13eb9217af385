"""Continues a prompt: the same as `dpjax generate`; `--help` lists the flags."""

from dpjax.commands.generate import main

if __name__ == "__main__":
  main()
