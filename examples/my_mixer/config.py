"""A small minGRU on Python's own language manual; `:hourglass` pools words around it.

python train.py --config=examples/my_mixer/config.py --workdir=runs/my_mixer
python train.py --config=examples/my_mixer/config.py:hourglass --workdir=runs/my_hourglass
"""

import my_mixer  # noqa: F401  (registers "min_gru")

import dpjax


def get_config(variant: str = ""):
  """Two layers, or three stacks of one layer with minGRU in the middle."""
  config = dpjax.config.default()
  model, train = config.model, config.train
  model.mixer = dpjax.config.mixer("min_gru", expansion=2)
  model.num_layers = 2
  model.width = 64
  model.feed_forward_width = 128
  model.max_length = 128
  model.norm_position = "pre"
  if variant == "hourglass":
    model.boundaries = dpjax.config.boundaries("whitespace")
    model.num_layers = model.first.num_layers = model.last.num_layers = 1
    for stack in (model.first, model.last):
      stack.mixer = dpjax.config.mixer("dispatcher", num_heads=4)
  elif variant:
    raise dpjax.UserError(f"expected the variant hourglass, or none, got {variant}")
  train.num_steps = 400
  train.num_epochs = 0.0
  train.learning_rate = 2e-3
  train.schedule = dpjax.config.schedule("cosine", warmup_steps=20)
  train.eval_every_steps = 100
  train.eval_every_epochs = 0.0
  config.sample.prompt = "The statement"
  return config
