"""A small Dispatcher on the language manual that comes with Python.

python train.py --config=configs/quickstart.py --workdir=runs/quickstart
python train.py --config=configs/quickstart.py:tiny --workdir=runs/tiny
"""

import dpjax


def get_config(variant: str = ""):
  config = dpjax.config.default()
  config.model.num_layers = 4
  config.model.width = 128
  config.model.feed_forward_width = 512
  config.model.mixer = dpjax.config.mixer("dispatcher_multihead", num_heads=4)
  config.model.max_length = 128
  config.train.batch_size = 16
  config.train.num_steps = 400
  config.train.num_epochs = 0.0
  config.train.learning_rate = 2e-3
  config.train.schedule = dpjax.config.schedule("cosine", warmup_steps=50)
  config.train.eval_every_steps = 100
  config.train.eval_every_epochs = 0.0
  config.sample.prompt = "The statement"
  config.sample.temperature = 0.8
  return dpjax.config.apply_variant(config, variant)
