"""Sends each report of a run to Weights & Biases.

pip install wandb
python examples/trackers/weights_and_biases.py quickstart runs/tracked
"""

import sys
from pathlib import Path

import wandb

import dpjax


def train(config, workdir, **settings):
  """As `dpjax.train`; a run that goes on reports to the same run of Weights & Biases."""
  name = Path(workdir).name
  with wandb.init(project="dpjax", id=name, resume="allow", config=config.to_dict()) as run:

    def report(step, metrics, state):
      run.log(metrics, step=step)

    return dpjax.train(config, workdir, callbacks=[report], **settings)


if __name__ == "__main__":
  train(dpjax.config.load(sys.argv[1]), sys.argv[2])
