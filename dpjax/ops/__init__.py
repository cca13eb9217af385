"""The papers' equations as pure functions on arrays; they need only JAX and jaxtyping.

Invalid arguments raise a `ValueError`; values are checked only outside of `jit`.
"""

import typing as _typing
from inspect import ismodule as _ismodule

from dpjax.ops.attention import causal_attention as causal_attention
from dpjax.ops.attention import relative_attention as relative_attention
from dpjax.ops.attention import relative_positions as relative_positions
from dpjax.ops.attention import rotary_angles as rotary_angles
from dpjax.ops.attention import rotate as rotate
from dpjax.ops.attention_cache import AttentionCache as AttentionCache
from dpjax.ops.attention_cache import causal_attention_cached as causal_attention_cached
from dpjax.ops.attention_cache import init_attention_cache as init_attention_cache
from dpjax.ops.attention_cache import local_attention_cached as local_attention_cached
from dpjax.ops.attention_cache import relative_attention_cached as relative_attention_cached
from dpjax.ops.boundaries import binomial_prior_loss as binomial_prior_loss
from dpjax.ops.boundaries import fixed_boundaries as fixed_boundaries
from dpjax.ops.boundaries import gumbel_sigmoid as gumbel_sigmoid
from dpjax.ops.boundaries import rate_bounds_loss as rate_bounds_loss
from dpjax.ops.boundaries import spacelike_boundaries as spacelike_boundaries
from dpjax.ops.boundaries import whitespace_boundaries as whitespace_boundaries
from dpjax.ops.bucketing import bucket_sizes as bucket_sizes
from dpjax.ops.bucketing import run_in_bucket as run_in_bucket
from dpjax.ops.convolution import CAUSAL_CONVOLUTION as CAUSAL_CONVOLUTION
from dpjax.ops.convolution import ConvolutionCache as ConvolutionCache
from dpjax.ops.convolution import causal_convolution as causal_convolution
from dpjax.ops.convolution import causal_convolution_cached as causal_convolution_cached
from dpjax.ops.convolution import init_convolution_cache as init_convolution_cache
from dpjax.ops.documents import check_starts as check_starts
from dpjax.ops.documents import document_positions as document_positions
from dpjax.ops.dropout import dropout as dropout
from dpjax.ops.dropout import relu_dropout as relu_dropout
from dpjax.ops.entropies import conditional_entropy as conditional_entropy
from dpjax.ops.entropies import entropy_spikes as entropy_spikes
from dpjax.ops.entropies import entropy_theta as entropy_theta
from dpjax.ops.entropies import entropy_threshold as entropy_threshold
from dpjax.ops.products import as_factor as as_factor
from dpjax.ops.products import dot_general as dot_general
from dpjax.ops.products import product_dtype as product_dtype
from dpjax.ops.routing import ratio_loss as ratio_loss
from dpjax.ops.routing import route as route
from dpjax.ops.routing import smooth_segments as smooth_segments
from dpjax.ops.routing import straight_through as straight_through
from dpjax.ops.segments import SegmentCache as SegmentCache
from dpjax.ops.segments import check_boundaries as check_boundaries
from dpjax.ops.segments import init_segment_cache as init_segment_cache
from dpjax.ops.segments import pool_segments as pool_segments
from dpjax.ops.segments import pool_segments_cached as pool_segments_cached
from dpjax.ops.segments import segment_ids as segment_ids
from dpjax.ops.segments import segment_starts as segment_starts
from dpjax.ops.segments import upsample_segments as upsample_segments
from dpjax.ops.selective_state_space import init_selective_state as init_selective_state
from dpjax.ops.selective_state_space import selective_state_space as selective_state_space
from dpjax.ops.selective_state_space import (
  selective_state_space_cached as selective_state_space_cached,
)
from dpjax.ops.shift_and_sum import SHIFT_AND_SUM as SHIFT_AND_SUM
from dpjax.ops.shift_and_sum import ShiftAndSumCache as ShiftAndSumCache
from dpjax.ops.shift_and_sum import dispatch_matrix as dispatch_matrix
from dpjax.ops.shift_and_sum import init_shift_and_sum_cache as init_shift_and_sum_cache
from dpjax.ops.shift_and_sum import num_levels as num_levels
from dpjax.ops.shift_and_sum import shift_and_sum as shift_and_sum
from dpjax.ops.shift_and_sum import shift_and_sum_cached as shift_and_sum_cached
from dpjax.ops.short_convolution import init_short_convolution_cache as init_short_convolution_cache
from dpjax.ops.short_convolution import short_convolution as short_convolution
from dpjax.ops.short_convolution import short_convolution_cached as short_convolution_cached

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
  name for name, value in [*globals().items()] if name[0] != "_" and not _ismodule(value)
]

if not _typing.TYPE_CHECKING:
  from dpjax import lazy as _lazy

  __getattr__ = _lazy.modules(__name__)
