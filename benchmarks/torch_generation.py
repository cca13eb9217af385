"""Generation by masked self-attention in PyTorch, for comparison with dpjax.

  python benchmarks/torch_generation.py '{"model": {...}, "batch": 16, "prompt": 16, ...}'

prints a line of JSON when it is ready, and for every line that it reads generates tokens and prints
the seconds (`harness.serve`); `benchmarks/generation.py` starts it. The modules are those of
`benchmarks/torch_models.py`, with a static cache of keys and values; in eager mode, only its
filled part is read.

B batch, T position, H head, M slot of a cache, E feature of a head.
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
    settings: "model", for `LanguageModel`; "batch"; "prompt", the number of tokens before those
      that are generated; "reads_prompt", whether it is read (not with "compile"), else its keys and
      values are random; "tokens", how many to generate; "dtype"; "compile".
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

  def step(self, tokens_bt, begin):
    """The token after some that begin at a position: one, or a prompt."""
    embedding = self.model.embedding
    positions = begin if self.settings["compile"] else slice(begin, begin + tokens_bt.shape[1])
    x_btd = embedding.tokens(tokens_bt) * embedding.scale
    x_btd = x_btd + embedding.table[positions].to(self.dtype)
    for layer, cache in zip(self.model.layers, self.cache, strict=True):
      x_btd = self.block(layer, cache, x_btd, positions)
    return self.model.logits(x_btd[:, -1:]).argmax(dim=-1)

  def block(self, layer, cache, x_btd, positions):
    """A layer, with the norm after each branch."""
    x_btd = layer.mixer_norm(x_btd + self.attend(layer.mixer, cache, x_btd, positions))
    return layer.feed_forward_norm(x_btd + layer.feed_forward(x_btd))

  def attend(self, mixer, cache, x_btd, positions):
    """Writes keys and values; attends to all up to these."""
    shape = (*x_btd.shape[:2], 3, self.num_heads, -1)
    q_bhte, *new = mixer.queries_keys_values(x_btd).view(shape).permute(2, 0, 3, 1, 4)
    if self.settings["compile"]:  # A program for all positions reads all slots.
      for kept, x_bhte in zip(cache, new, strict=True):
        kept.index_copy_(2, positions, x_bhte)
      (k_bhme, v_bhme), mask = cache, (torch.arange(cache.shape[3]) <= positions)[None]
    else:
      cache[0][:, :, positions], cache[1][:, :, positions] = new
      (k_bhme, v_bhme), mask = cache[:, :, :, : positions.stop], None
    # A prompt begins at 0, so that positions and slots are equal.
    is_causal = x_btd.shape[1] > 1
    y_bhte = F.scaled_dot_product_attention(q_bhte, k_bhme, v_bhme, mask, is_causal=is_causal)
    return mixer.out(y_bhte.transpose(1, 2).reshape(x_btd.shape))

  @torch.inference_mode()
  def run(self):
    """The seconds for `tokens` of every row, and those for the prompt if it is read."""
    batch, begin, tokens = (self.settings[key] for key in ("batch", "prompt", "tokens"))
    token_b1 = torch.zeros(batch, 1, dtype=torch.long)
    start = time.perf_counter()
    if self.settings["reads_prompt"]:
      token_b1, tokens = self.step(torch.zeros(batch, begin, dtype=torch.long), 0), tokens - 1
    for position in range(begin, begin + tokens):
      is_compiled = self.settings["compile"]
      token_b1 = self.step(token_b1, torch.tensor([position]) if is_compiled else position)
    token_b1.tolist()
    return {"seconds": time.perf_counter() - start}


def main():
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  rows = Rows(json.loads(sys.argv[1]))
  serve({"version": torch.__version__}, rows.run)


if __name__ == "__main__":
  main()
