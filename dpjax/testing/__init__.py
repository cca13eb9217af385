"""Checks that a component of one's own fulfils the contract of dpjax's own.

`check_mixer(MyMixer)` is for token mixers, `check_boundaries(MyBoundaries)` for segment boundaries.
"""

from dpjax.testing.boundaries import BOUNDARY_RELATIONS as BOUNDARY_RELATIONS
from dpjax.testing.boundaries import check_boundaries as check_boundaries
from dpjax.testing.mixers import RELATIONS as RELATIONS
from dpjax.testing.mixers import check_mixer as check_mixer
