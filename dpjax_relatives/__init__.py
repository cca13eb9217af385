"""Mixers whose recurrences are those of jax-linear-attention: a plugin, `dpjax[relatives]`.

Names, settings and classes need no other package; a mixer that is made needs the package `jla`.
"""

from typing import TYPE_CHECKING

from dpjax_relatives.linear_attention import GLA as GLA
from dpjax_relatives.linear_attention import KDA as KDA
from dpjax_relatives.linear_attention import DeltaNet as DeltaNet
from dpjax_relatives.linear_attention import GatedDeltaNet as GatedDeltaNet
from dpjax_relatives.linear_attention import GatedDeltaNet2 as GatedDeltaNet2
from dpjax_relatives.log_linear_mamba2 import LogLinearMamba2 as LogLinearMamba2

MIXERS = {
  "gated_deltanet": GatedDeltaNet,
  "gdn2": GatedDeltaNet2,
  "kda": KDA,
  "deltanet": DeltaNet,
  "gla": GLA,
  "log_linear_mamba2": LogLinearMamba2,
}

if not TYPE_CHECKING:
  from dpjax import lazy

  __getattr__ = lazy.modules(__name__)
