"""Generation by masked self-attention in PyTorch, for comparison with dpjax.

  python benchmarks/torch_generation.py '{"model": {...}, "batch": 16, "prompt": 16, ...}'

prints a line of JSON when it is ready, and for every line that it reads generates tokens and prints
the seconds of one (`harness.serve`); `benchmarks/generation.py` starts it. The modules are those of
`benchmarks/torch_models.py`, with a static cache of keys and values; in eager mode, only its
filled part is read.

B batch, H head, M slot of a cache, E feature of a head.
"""

import json
import os
import sys
import time

from harness import serve
from torch_models import F, LanguageModel, torch


class Rows:
  """Rows of text, greedily continued.

  Args:
    settings: "model", for `LanguageModel`; "batch"; "prompt" and "tokens", the numbers of tokens
      before and while it is timed; "dtype"; "compile".
  """

  def __init__(self, settings):
    torch.manual_seed(0)
    model, self.settings = settings["model"], settings
    self.dtype = getattr(torch, settings["dtype"])
    self.model = LanguageModel(model).to(self.dtype).eval()
    self.num_heads = model["mixer"]["num_heads"]
    features = model["width"] // self.num_heads
    shape = model["num_layers"], 2, settings["batch"], self.num_heads, model["max_length"], features
    self.cache = torch.randn(shape).to(self.dtype)
    # One compiled layer for all.
    self.block = torch.compile(self.block) if settings["compile"] else self.block

  def step(self, token_b, position):
    """The token after the one at a position."""
    embedding = self.model.embedding
    x_bd = embedding.tokens(token_b) * embedding.scale
    x_bd = x_bd + embedding.table[position].to(self.dtype)
    for layer, cache in zip(self.model.layers, self.cache, strict=True):
      x_bd = self.block(layer, cache, x_bd, position)
    return self.model.logits(x_bd).argmax(dim=-1)

  def block(self, layer, cache, x_bd, position):
    """A layer, with the norm after each branch."""
    x_bd = layer.mixer_norm(x_bd + self.attend(layer.mixer, cache, x_bd, position))
    return layer.feed_forward_norm(x_bd + layer.feed_forward(x_bd))

  def attend(self, mixer, cache, x_bd, position):
    """Writes a key and a value; attends to all up to these."""
    qkv = mixer.queries_keys_values(x_bd).view(len(x_bd), 3, self.num_heads, -1)
    q_bhe, k_bhe, v_bhe = qkv.unbind(1)
    if self.settings["compile"]:  # A program for all positions reads all slots.
      for kept, new in zip(cache, (k_bhe, v_bhe), strict=True):
        kept.index_copy_(2, position, new[:, :, None])
      (k_bhme, v_bhme), mask = cache, (torch.arange(cache.shape[3]) <= position)[None]
    else:
      cache[0, :, :, position], cache[1, :, :, position] = k_bhe, v_bhe
      (k_bhme, v_bhme), mask = cache[:, :, :, : position + 1], None
    y_bh1e = F.scaled_dot_product_attention(q_bhe[:, :, None], k_bhme, v_bhme, mask)
    return mixer.out(y_bh1e.reshape(x_bd.shape))

  @torch.inference_mode()
  def run(self):
    """The seconds per token of all rows, after a prompt with random keys and values."""
    token_b = torch.zeros(self.settings["batch"], dtype=torch.long)
    first, tokens = self.settings["prompt"] + 16, self.settings["tokens"]
    start = time.perf_counter()
    for position in range(first, first + tokens):
      is_compiled = self.settings["compile"]
      token_b = self.step(token_b, torch.tensor([position]) if is_compiled else position)
    token_b.tolist()
    return {"seconds": (time.perf_counter() - start) / tokens}


def main():
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  rows = Rows(json.loads(sys.argv[1]))
  serve({"version": torch.__version__}, rows.run)


if __name__ == "__main__":
  main()
