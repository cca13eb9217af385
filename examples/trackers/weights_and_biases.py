"""Sends each report of a run to Weights & Biases.

pip install wandb
python examples/trackers/weights_and_biases.py quickstart runs/tracked
"""

import hashlib
import sys
from pathlib import Path

import wandb

import dpjax


def train(config, workdir, **settings):
  """Like `dpjax.train`; a resumed run reports to the same Weights & Biases run."""
  folder = Path(workdir).resolve()
  settings_of_run = {
    "name": folder.name,
    "id": hashlib.sha256(str(folder).encode()).hexdigest()[:16],
    "config": config.to_dict(),
  }
  with wandb.init(project="dpjax", resume="allow", **settings_of_run) as run:

    def report(step, metrics, state):
      run.log(metrics, step=step)

    return dpjax.train(config, workdir, callbacks=[report], **settings)


if __name__ == "__main__":
  train(dpjax.config.load(sys.argv[1]), sys.argv[2])
