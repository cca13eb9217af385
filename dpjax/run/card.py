"""The card of an exported model: scores, how to load it, and its equations as NumPy code.

It begins with the metadata by which the Hugging Face Hub finds models.
"""

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpjax import __version__, files
from dpjax import config as config_lib
from dpjax.data import mixture, remote
from dpjax.run import numpy_model

_CARD = """# {name}

A language model of {size:,} parameters, trained with dpjax {version} for {run.step:,} updates
on {run.data.name} ({run.data.counts[train][tokens]:,} training tokens; {run.tokenizer.kind} of \
{run.tokenizer.vocab_size:,} entries).

| split | score | |
|---|---|---|
{scores}

```python
import dpjax

run = dpjax.load("{place}")
run.generate("...", length=100)
run.score("a text")
```

`model.safetensors` holds the parameters in {dtype}, `config.json` all settings.
"""
_DESCRIPTION = """
## The model

{model}
| array | shape |
|---|---|
{rows}
"""
_MODEL = """At most {max_length:,} tokens at once. Row t of the logits is for token t + 1; the token
{start_id} stands before a text. A matrix is [in, out], and heads lie side by side among the
features. Arrays of a stack of layers have the layers as their first axis. This is the whole model
in NumPy, without dropout{computes}; branches for other settings may call what is not here:

```python
{code}
```

In PyTorch, `safetensors.torch.load_file` reads the arrays.
"""
_IMPORTS = "import numpy as np\nfrom safetensors.numpy import load_file"
_LOADING = """arrays = load_file("model.safetensors")
arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
model = json.load(open("config.json"))["model"]"""
_LOGITS = """def logits(tokens):  # [T] -> [T, V]
  return forward(tokens, arrays, model)"""


def _components(model: Mapping) -> set[str]:
  mixers = {section["name"] for section in config_lib.mixers_in(model).values()}
  kinds = {stage["boundaries"]["name"] for stage in config_lib.stages_in(model).values()}
  return (mixers | kinds) - {"none"}


def numpy_code(model: Mapping, frozen: Mapping | None = None, dtype: str = "float32") -> str:
  """A program with a function `logits`, [T] -> [T, V], that computes an exported model."""
  models = [model, frozen] if frozen else [model]
  names = sorted({name for each in models for name in _components(each)})
  table = {name: numpy_model.FUNCTIONS[name].__name__ for name in names}
  known = {name: x for name, x in vars(numpy_model).items() if inspect.isfunction(x)}
  if not any(config_lib.is_pooled(each) for each in models):
    del known["hourglass"]  # `forward` never comes to its call
  sources, wanted = {}, {"forward", *table.values()}
  while wanted:
    name = wanted.pop()
    sources[name] = inspect.getsource(known[name]).strip()
    wanted |= {*re.findall(r"(\w+)\(", sources[name])} & {*known} - {*sources}
  parts = [sources[name] for name in known if name in sources]
  functions = ", ".join(f'"{name}": {function}' for name, function in table.items())
  settings = f"FUNCTIONS = {{{functions}}}\n{_LOADING}"
  if "space_ids" in model["boundaries"]:  # filled in by the tokenizer
    settings += '\nmodel["boundaries"] = json.load(open("boundaries.json"))'
  if frozen:
    settings += '\nmodel["boundaries"]["frozen"] = json.load(open("frozen.json"))'
  bfloat16 = "import ml_dtypes  # lets NumPy read bfloat16\n" * (dtype == "bfloat16")
  imports = f"import json\nimport math\n\n{bfloat16}{_IMPORTS}"
  return "\n\n\n".join([imports, *parts, settings, _LOGITS])


def describe(
  model: Mapping | None,
  shapes: Mapping[str, tuple[int, ...]],
  *,
  frozen: Mapping | None = None,
  start_id: int = 0,
  dtype: str = "float32",
) -> str:
  """A model's code and arrays; None: made in Python; `frozen`: the model of its boundaries."""
  rows = "\n".join(f"| `{name}` | {', '.join(map(str, x))} |" for name, x in sorted(shapes.items()))
  names = ["its class"] if model is None else sorted(_components(model) - {*numpy_model.FUNCTIONS})
  if names or model is None:
    about = f"Its code is its author's own, and no part of this folder: {', '.join(names)}.\n"
  else:
    computes = "" if model["dtype"] == "float32" else f", up to rounding to {model['dtype']}"
    if model["boundaries"].get("sample"):
      computes += ", with rounded boundaries where dpjax draws them"
    given = dict(max_length=model["max_length"], start_id=start_id, computes=computes)
    about = _MODEL.format(code=numpy_code(model, frozen, dtype), **given)
  return _DESCRIPTION.format(model=about, rows=rows)


def write(
  run: Any,
  place: str,
  shapes: Mapping,
  *,
  license: str = "",
  is_built: bool = True,
  **description: Any,
) -> str:
  """The card of a run, in Markdown.

  Args:
    run: a `Run`.
    place: where to load it from: a folder, or hf://OWNER/NAME.
    shapes: those of the parameters, by name.
    license: the Hub's name of the model's licence; "": none is stated.
    is_built: whether the model is that of the settings.
    **description: see `describe`.
  """
  name, scores = place.rpartition("/")[2], [*_scores(run)]
  rows = [f"| {split} | {score.replace('_', ' ')} | {x:.4g} |" for split, score, x in scores]
  head = _CARD.format(
    name=name,
    place=place,
    run=run,
    size=sum(math.prod(shape) for shape in shapes.values()),
    version=__version__,
    scores="\n".join(rows) or "| - | not scored | |",
    dtype=description["dtype"],
  )
  model, start_id = run.config.model if is_built else None, run.tokenizer.start_id
  about = describe(model, shapes, start_id=start_id, **description)
  return _metadata(run, name, license, scores) + head + about


def _metadata(run: Any, name: str, license: str, scores: Sequence) -> str:
  """The YAML at the beginning of a card at the Hub."""
  from huggingface_hub import EvalResult, ModelCardData

  data, task = run.config.data, "text-generation"
  names = mixture.parse(data.mixture) or ([] if data.path else [data.name])
  datasets = [remote.parse_hub(name)[0] for name in names if name.startswith("hf:")]
  corpus = datasets[0] if len(names) == 1 and datasets else run.data.name, run.data.name
  results = [EvalResult(task, *corpus, x, value, dataset_split=y) for y, x, value in scores]
  about = ModelCardData(
    library_name="dpjax",
    pipeline_tag=task,
    tags=["jax", "flax", *sorted(_components(run.config.model))],
    license=license or None,
    datasets=datasets or None,
    metrics=[*dict.fromkeys(score for _, score, _ in scores)] or None,
    model_name=name,
    eval_results=results or None,
  )
  return f"---\n{about.to_yaml()}\n---\n\n"


def _scores(run: Any) -> Iterator[tuple[str, str, float]]:
  """The split, name and value of each score in a run's folder."""
  for path in sorted(Path(run.workdir).glob(f"scores_*_{run.step}.json")):
    content = files.read_json(path)
    split, scores = content.get("split"), content.get("scores")
    for name, value in scores.items() if isinstance(scores, dict) else ():
      if isinstance(split, str) and type(value) in (int, float) and math.isfinite(value):
        yield split, name, value
