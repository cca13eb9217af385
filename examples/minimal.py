"""A Dispatcher language model in one file: python examples/minimal.py.

It learns the characters of Python's own manual, in about a minute on two CPU cores, and then writes
some text. The Dispatcher (aclanthology.org/2022.clasp-1.3) is a Transformer whose O(T^2)
self-attention is replaced by O(T log T) shift-and-sum. The rest is standard: layers with
residuals, the cross entropy of the next character, and Adam.

B batch, T position, D width, K level, V vocabulary; names end with the shapes of their arrays.
"""

import sys
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dpjax import layers, ops

BATCH, LENGTH, WIDTH, NUM_LAYERS = 16, 128, 128, 3
NUM_STEPS, LEARNING_RATE, LOG_EVERY = 600, 3e-3, 50


class Dispatcher(nn.Module):
  """Mixes the positions of a text: each reads those 1, 2, 4, ... before it, level by level.

    v_0 = W_in x,  v_{k+1}[t] = v_k[t] + sigmoid(W_c x[t])_k v_k[t - 2**k],  y = W_out v_K

  After K levels v_K[t] is a sum over the 2**K positions up to t, and no later ones; its weights
  depend on the text. `layers.Dispatcher` adds heads, dropout and a cache.
  """

  @nn.compact
  def __call__(self, x_btd: jax.Array) -> jax.Array:
    """[B, T, D] -> [B, T, D]."""
    num_levels = ops.num_levels(LENGTH)  # log2(T)
    v_btd = nn.Dense(WIDTH, use_bias=False, name="values")(x_btd)
    g_btk = nn.sigmoid(nn.Dense(num_levels, use_bias=False, name="gates")(x_btd))
    # The operator has a head axis after T, here of size 1.
    v_btd = ops.shift_and_sum(v_btd[:, :, None], g_btk[:, :, None])[:, :, 0]
    return nn.Dense(WIDTH, use_bias=False, name="out")(v_btd)


class Model(nn.Module):
  """Predicts the next character at each position."""

  vocab_size: int

  @nn.compact
  def __call__(self, tokens_bt: jax.Array) -> jax.Array:
    """Ids [B, T] -> logits [B, T, V]."""
    x_btd = nn.Embed(self.vocab_size, WIDTH)(tokens_bt)  # Shifts tell positions apart.
    for _ in range(NUM_LAYERS):
      x_btd += Dispatcher()(nn.LayerNorm()(x_btd))
      x_btd += layers.FeedForward(4 * WIDTH)(nn.LayerNorm()(x_btd))
    return nn.Dense(self.vocab_size)(nn.LayerNorm()(x_btd))


def train(model: Model, tokens: np.ndarray, num_steps: int) -> dict:
  """Trains on random windows of a text, and prints the mean loss in nats per character."""
  schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, num_steps // 10, num_steps)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

  @jax.jit
  def update(params, state, window_bt):
    def loss_of(params):
      logits_btv = model.apply({"params": params}, window_bt[:, :-1])
      targets_bt = window_bt[:, 1:]
      return optax.softmax_cross_entropy_with_integer_labels(logits_btv, targets_bt).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss

  params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  state, losses, generator = optimizer.init(params), [], np.random.default_rng(0)
  for step in range(1, num_steps + 1):
    starts = generator.integers(len(tokens) - LENGTH, size=(BATCH, 1))
    params, state, loss = update(params, state, tokens[starts + np.arange(LENGTH + 1)])
    losses.append(float(loss))
    if step % LOG_EVERY == 0 or step == num_steps:
      print(f"step {step:4}: loss {np.mean(losses[-LOG_EVERY:]):.3f}", flush=True)
  return params


def sample(model: Model, params: dict, prompt: np.ndarray, length: int) -> np.ndarray:
  """Continues a prompt, one character at a time, each drawn at temperature 0.7."""

  @jax.jit
  def draw(window_t, end, key):
    logits_tv = model.apply({"params": params}, window_t[None])[0]
    return jax.random.categorical(key, logits_tv[end] / 0.7)

  text_t = prompt
  for key in jax.random.split(jax.random.key(1), length):
    recent_t = text_t[-LENGTH:]
    # Padding after a text cannot change it: the model is causal.
    window_t = np.pad(recent_t, (0, LENGTH - len(recent_t)))
    text_t = np.append(text_t, draw(window_t, len(recent_t) - 1, key))
  return text_t


def main(num_steps: int = NUM_STEPS) -> None:
  """Trains a model and prints a sample."""
  manual = "\n".join(topics.values())
  vocabulary, tokens = np.unique(list(manual), return_inverse=True)
  model = Model(len(vocabulary))
  params = train(model, tokens.astype(np.int32), num_steps)
  prompt = "The statement "
  ids = np.searchsorted(vocabulary, list(prompt)).astype(np.int32)
  print("".join(vocabulary[sample(model, params, ids, length=300)]))


if __name__ == "__main__":
  main(*map(int, sys.argv[1:]))
