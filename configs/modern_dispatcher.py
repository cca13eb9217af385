"""The Dispatcher instead of attention in a modern Transformer, on children's books.

  python train.py --config=configs/modern_dispatcher.py --workdir=runs/modern_dispatcher
  python train.py --config=configs/modern_dispatcher.py:small --workdir=runs/small_dispatcher
  python train.py --config=configs/modern_dispatcher.py:tiny --workdir=runs/tiny

Everything but the mixer comes from configs/modern_transformer.py, including variants and data
(downloaded into data/, or from --config.data.path). It has no position embeddings: a
Dispatcher knows distances from its levels.

Parameters:      6.7M, small 1.3M; vocabulary 5,000
Hardware, hours: small a quarter of an hour on one core of an AMD EPYC
Test perplexity: small 74.9 (docs/results.md)
"""

import dpjax
from configs import modern_transformer


def get_config(variant: str = ""):
  config = modern_transformer.get_config(variant)
  config.model.mixer = dpjax.config.mixer("dispatcher")
  return config
