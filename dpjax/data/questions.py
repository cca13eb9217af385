"""Multiple-choice questions, one JSON object on each line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dpjax.errors import UserError
from dpjax.text.tokenizer import read_json

# The names that files give the fields, as those of HellaSwag, ARC and MMLU, and of tasks of
# lm-evaluation-harness.
CONTEXT = ("context", "ctx", "query", "question", "prompt")
CHOICES = ("choices", "endings", "options")
ANSWER = ("answer", "label", "gold")


class Question(NamedTuple):
  """A context, the choices of its continuation, and the index of the right one."""

  context: str
  choices: tuple[str, ...]
  answer: int


def read_questions(path: str | Path) -> list[Question]:
  """Reads a file of questions.

    {"ctx": "The cat sat on", "endings": ["the mat.", "a rat"], "label": 0}
      ->  Question("The cat sat on", ("the mat.", "a rat"), 0)

  Args:
    path: a UTF-8 file with one JSON object on each line. It has one field of each of
      `CONTEXT`, `CHOICES` and `ANSWER`: a text, at least two nonempty texts, and the index
      of the right one, as a number or in digits. Other fields are ignored.

  Returns:
    The questions in order, at least one.

  Raises:
    ValueError: the file cannot be read, or a line is not a question; the message names the
      line and the field.
  """
  path = Path(path)
  try:
    text = path.read_text("utf-8-sig")
  except UnicodeDecodeError as error:
    raise UserError(f"choices: expected UTF-8 in {path}, got: {error}") from error
  except OSError as error:
    raise UserError(f"choices: expected to read {path}, got: {error.strerror}") from error
  lines = text.removesuffix("\n").split("\n") if text.strip() else []
  if not lines:
    raise UserError(f"choices: expected a question a line in {path}, got none")
  return [_read(line, f"line {i} of {path}") for i, line in enumerate(lines, 1)]


def _read(line: str, place: str) -> Question:
  try:
    row = read_json(line)
  except ValueError as error:
    raise UserError(f"choices: expected JSON in {place}, got: {error}") from error
  if not isinstance(row, Mapping):
    raise UserError(f"choices: expected a JSON object in {place}, got {_short(row)}")
  (_, context), (key, choices), (of_answer, answer) = (
    _field(row, names, place) for names in (CONTEXT, CHOICES, ANSWER)
  )
  if not isinstance(context, str):
    raise UserError(f"choices: expected a text as the context of {place}, got {_short(context)}")
  is_list = isinstance(choices, list) and len(choices) > 1
  if not is_list or not all(isinstance(choice, str) and choice for choice in choices):
    raise UserError(
      f"choices: expected at least 2 texts, none of them empty, as {key} of {place}, got "
      f"{_short(choices)}"
    )
  number = int(answer) if isinstance(answer, str) and answer.isdecimal() else answer
  if type(number) is not int or not 0 <= number < len(choices):
    raise UserError(
      f"choices: expected 0 to {len(choices) - 1} as {of_answer} of {place}, got {_short(answer)}"
    )
  return Question(context, tuple(choices), number)


def _field(row: Mapping[str, Any], names: tuple[str, ...], place: str) -> tuple[str, Any]:
  """The one field with one of these names."""
  found = [name for name in names if name in row]
  if len(found) != 1:
    raise UserError(
      f"choices: expected one field of {', '.join(names)} in {place}, got "
      f"{' and '.join(found) or 'none'}"
    )
  return found[0], row[found[0]]


def _short(value: Any) -> str:
  text = json.dumps(value, ensure_ascii=False)
  return text if len(text) <= 60 else f"{text[:60]}..."
