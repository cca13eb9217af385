"""The papers' equations as pure functions on arrays; they need only JAX.

Other arguments than described raise a `ValueError`; values are checked only outside of `jit`.
"""

from dpjax.ops.attention import causal_attention, relative_attention, relative_positions
from dpjax.ops.attention_cache import (
  AttentionCache,
  causal_attention_cached,
  init_attention_cache,
  relative_attention_cached,
)
from dpjax.ops.boundaries import (
  binomial_prior_loss,
  fixed_boundaries,
  gumbel_sigmoid,
  spacelike_boundaries,
  whitespace_boundaries,
)
from dpjax.ops.capacity import capacities, run_at_capacity
from dpjax.ops.causal_convolution import IMPLEMENTATIONS as CAUSAL_CONVOLUTION
from dpjax.ops.causal_convolution import causal_convolution
from dpjax.ops.causal_convolution_cache import (
  ConvolutionCache,
  OnlineConvolutionCache,
  causal_convolution_cached,
  init_convolution_cache,
  init_online_convolution_cache,
)
from dpjax.ops.documents import check_starts, document_places
from dpjax.ops.dropout import dropout, relu_dropout
from dpjax.ops.entropies import (
  conditional_entropy,
  entropy_spikes,
  entropy_theta,
  entropy_threshold,
)
from dpjax.ops.products import dot_general
from dpjax.ops.rotary import rotary_angles, rotate
from dpjax.ops.routing import ratio_loss, route, smooth_segments, straight_through
from dpjax.ops.segments import (
  SegmentCache,
  check_boundaries,
  init_segment_cache,
  pool_segments,
  pool_segments_cached,
  segment_ids,
  segment_starts,
  upsample_segments,
)
from dpjax.ops.shift_and_sum import IMPLEMENTATIONS as SHIFT_AND_SUM
from dpjax.ops.shift_and_sum import (
  ShiftAndSumCache,
  dispatch_matrix,
  init_shift_and_sum_cache,
  num_levels,
  shift_and_sum,
  shift_and_sum_cached,
)

__all__ = [
  "CAUSAL_CONVOLUTION",
  "SHIFT_AND_SUM",
  "AttentionCache",
  "ConvolutionCache",
  "OnlineConvolutionCache",
  "SegmentCache",
  "ShiftAndSumCache",
  "binomial_prior_loss",
  "capacities",
  "causal_attention",
  "causal_attention_cached",
  "causal_convolution",
  "causal_convolution_cached",
  "check_boundaries",
  "check_starts",
  "conditional_entropy",
  "dispatch_matrix",
  "document_places",
  "dot_general",
  "dropout",
  "entropy_spikes",
  "entropy_theta",
  "entropy_threshold",
  "fixed_boundaries",
  "gumbel_sigmoid",
  "init_attention_cache",
  "init_convolution_cache",
  "init_online_convolution_cache",
  "init_segment_cache",
  "init_shift_and_sum_cache",
  "num_levels",
  "pool_segments",
  "pool_segments_cached",
  "ratio_loss",
  "relative_attention",
  "relative_attention_cached",
  "relative_positions",
  "relu_dropout",
  "rotary_angles",
  "rotate",
  "route",
  "run_at_capacity",
  "segment_ids",
  "segment_starts",
  "shift_and_sum",
  "shift_and_sum_cached",
  "smooth_segments",
  "spacelike_boundaries",
  "straight_through",
  "upsample_segments",
  "whitespace_boundaries",
]
