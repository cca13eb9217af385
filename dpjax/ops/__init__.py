"""The papers' equations as pure functions on arrays; they need JAX alone."""

from dpjax.ops.attention import causal_attention
from dpjax.ops.causal_convolution import causal_convolution
from dpjax.ops.shift_and_sum import dispatch_matrix, num_levels, shift_and_sum

__all__ = [
    "causal_attention", "causal_convolution", "dispatch_matrix", "num_levels",
    "shift_and_sum"]
