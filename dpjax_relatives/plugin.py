"""Registers the mixers of `dpjax_relatives` when it is imported."""

import dpjax
from dpjax_relatives import MIXERS

for _name, _mixer in MIXERS.items():
  dpjax.register_mixer(_name, _mixer)
