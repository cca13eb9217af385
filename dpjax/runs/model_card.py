"""The card of an exported model: scores, and how to load it.

It begins with the metadata by which the Hugging Face Hub finds models.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from dpjax import __version__, files
from dpjax.config import sections
from dpjax.data import mixture, remote

if TYPE_CHECKING:
  from dpjax.runs.run import Run

_CARD = """# {name}

A language model of {size:,} parameters, trained with dpjax {version} for {run.step:,} updates
on {run.data.name} ({run.data.counts[train][tokens]:,} training tokens; {run.tokenizer.name} of \
{run.tokenizer.vocab_size:,} entries).

| split | score | |
|---|---|---|
{scores}

```python
import dpjax

run = dpjax.load("{address}")
run.generate("...", length=100)
run.score("a text")
```

`model.safetensors` has the parameters in {dtype}, `config.json` all settings, `data` the tokenizer.
{notes}
"""
_NUMPY = """
`numpy_model.py` is the whole model in NumPy, and needs nothing else:

```sh
python numpy_model.py . {run.tokenizer.start_id}  # the ids and probabilities of likely next tokens
```

{ids}"""
# How a text becomes ids, by tokenizer.
_IDS = {
  "characters": "The id of a character is its place, from 0, in `characters` of "
  "`data/tokenizer.json`; {run.tokenizer.unknown_id} is every other character.",
  "bytes": "The ids of a text are its bytes in UTF-8: `[*text.encode()]` in Python.",
  "bytes_with_ends": "The ids of a text are {run.tokenizer.start_id} and its bytes in UTF-8: "
  "`[{run.tokenizer.start_id}, *text.encode()]` in Python.",
  "bpe": "The package `tokenizers` turns a text into ids, by the value of `tokenizer` in "
  "`data/tokenizer.json`: "
  "`Tokenizer.from_str(json.dumps(value)).encode(text, add_special_tokens=False).ids`.",
}
_OTHER_IDS = "`run.tokenizer.encode(text)` of dpjax turns a text into ids."
_FOREIGN = "\nThis folder lacks the code of {names}, which is its author's."
_NO_PROGRAM = "\nThis folder has no program of the model in NumPy."


def foreign_components(models: Sequence[Mapping]) -> list[str]:
  """The components of models that are not dpjax's, by name.

  `models` are the settings of a model, and of that which its boundaries use.
  """
  foreign = set()
  for model in models:
    for components, names in sections.component_names(model).items():
      foreign |= {name for name in names if not components.is_builtin(name)}
  return sorted(foreign)


def write(
  run: "Run",
  address: str,
  dtype: str,
  *,
  foreign: Sequence[str],
  has_program: bool,
  license: str = "",
) -> str:
  """The card of a run, in Markdown.

  Args:
    run: a `Run`.
    address: where to load it from: a folder, or hf://OWNER/NAME.
    dtype: the dtype of the parameters.
    foreign: what is not dpjax's: "its class", or the result of `foreign_components`.
    has_program: whether the export has the model in NumPy.
    license: the Hub's name for the model's licence; "": not stated.
  """
  from huggingface_hub import EvalResult, ModelCardData

  assert run.data is not None
  name = address.rpartition("/")[2]
  scores = list(_scores(run))
  ids = _IDS.get(run.tokenizer.name, _OTHER_IDS).format(run=run)
  notes = [_NUMPY.format(run=run, ids=ids) if has_program else _NO_PROGRAM]
  if foreign:
    notes.append(_FOREIGN.format(names=", ".join(foreign)))
  rows = [f"| {split} | {score.replace('_', ' ')} | {x:.4g} |" for split, score, x in scores]
  text = _CARD.format(
    name=name,
    address=address,
    run=run,
    size=sum(x.size for x in jax.tree.leaves(run.params)),
    version=__version__,
    scores="\n".join(rows) or "| - | not scored | |",
    dtype=dtype,
    notes="\n".join(notes),
  )
  model = run.config.model
  data = run.config.data
  task = "text-generation"
  names = mixture.parse(data.mixture) or ([] if data.path else [data.name])
  datasets = [remote.parse_hub(name)[0] for name in names if name.startswith("hf:")]
  dataset = datasets[0] if len(names) == 1 and datasets else run.data.name
  results = [
    EvalResult(task, dataset, run.data.name, score, value, dataset_split=split)
    for split, score, value in scores
  ]
  metadata = ModelCardData(
    library_name="dpjax",
    pipeline_tag=task,
    tags=["jax", "flax", *sorted(set().union(*sections.component_names(model).values()))],
    license=license or None,
    datasets=datasets or None,
    metrics=[*dict.fromkeys(score for _, score, _ in scores)] or None,
    model_name=name,
    eval_results=results or None,
  )
  return f"---\n{metadata.to_yaml()}\n---\n\n{text}"


def _scores(run: "Run") -> Iterator[tuple[str, str, float]]:
  """The split, name and value of each score in a run's folder."""
  assert run.workdir is not None
  for path in sorted(Path(run.workdir).glob(f"scores_*_{run.step}.json")):
    content = files.read_json(path)
    split = content.get("split")
    scores = content.get("scores")
    for name, value in scores.items() if isinstance(scores, dict) else ():
      if isinstance(split, str) and type(value) in (int, float) and math.isfinite(value):
        yield split, name, value
