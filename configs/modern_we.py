"""The Extractor WE instead of attention in a modern Transformer, on children's books.

  python train.py --config=configs/modern_we.py --workdir=runs/modern_we
  python train.py --config=configs/modern_we.py:small --workdir=runs/small_we
  python train.py --config=configs/modern_we.py:tiny --workdir=runs/tiny

Everything but the mixer comes from configs/modern_transformer.py, including variants and data
(downloaded into data/, or from --config.data.path). It has no position embeddings: an
Extractor knows distances from its taps.

Parameters:      7.2M, small 1.4M; vocabulary 5,000
Hardware, hours: small a quarter of an hour on one core of an AMD EPYC
Test perplexity: small 57.0 (docs/results.md)
"""

import dpjax
from configs import modern_transformer


def get_config(variant: str = ""):
  config = modern_transformer.get_config(variant)
  config.model.mixer = dpjax.config.mixer("we")
  return config
