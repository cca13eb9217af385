"""The papers' equations as pure functions on arrays; they need JAX alone."""

from dpjax.ops.attention import causal_attention, relative_attention, relative_positions
from dpjax.ops.boundaries import (
  binomial_prior_loss,
  conditional_entropy,
  entropy_spikes,
  fixed_boundaries,
  gumbel_sigmoid,
  whitespace_boundaries,
)
from dpjax.ops.capacity import capacities, run_at_capacity
from dpjax.ops.causal_convolution import causal_convolution
from dpjax.ops.dropout import dropout
from dpjax.ops.segments import (
  check_boundaries,
  pool_segments,
  segment_ids,
  upsample_segments,
)
from dpjax.ops.shift_and_sum import dispatch_matrix, num_levels, shift_and_sum

__all__ = [
  "binomial_prior_loss",
  "capacities",
  "causal_attention",
  "causal_convolution",
  "check_boundaries",
  "conditional_entropy",
  "dispatch_matrix",
  "dropout",
  "entropy_spikes",
  "fixed_boundaries",
  "gumbel_sigmoid",
  "num_levels",
  "pool_segments",
  "relative_attention",
  "relative_positions",
  "run_at_capacity",
  "segment_ids",
  "shift_and_sum",
  "upsample_segments",
  "whitespace_boundaries",
]
