"""Losses, optimizers, steps, checkpoints and the training loop."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.training.checkpoints import Checkpoints as Checkpoints
  from dpjax.training.evaluation import evaluate as evaluate
  from dpjax.training.evaluation import jit_eval_step as jit_eval_step
  from dpjax.training.loop import Callback as Callback
  from dpjax.training.loop import Hooks as Hooks
  from dpjax.training.loop import RunFolder as RunFolder
  from dpjax.training.loop import fit as fit
  from dpjax.training.losses import Objective as Objective
  from dpjax.training.losses import cross_entropy as cross_entropy
  from dpjax.training.metrics import text_scores as text_scores
  from dpjax.training.optimizers import build_optimizer as build_optimizer
  from dpjax.training.optimizers import make_optimizer as make_optimizer
  from dpjax.training.optimizers import scale_by_stage as scale_by_stage
  from dpjax.training.reporting import NonFiniteError as NonFiniteError
  from dpjax.training.sharding import make_mesh as make_mesh
  from dpjax.training.sharding import put_batch as put_batch
  from dpjax.training.trainer import Trainer as Trainer
  from dpjax.training.trainer import TrainState as TrainState
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
