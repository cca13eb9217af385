"""Files of multiple-choice questions: names of fields, and lines that are none."""

import json

import pytest

from dpjax.data import Question, read_questions

GOOD = {"context": "a cat", "choices": ["sat", "mat", "ran"], "answer": 2}


def write(path, *rows):
  lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
  path.write_text("\n".join(lines) + "\n", "utf-8")
  return path


@pytest.mark.parametrize(
  "row",
  [
    GOOD,
    {"ctx": "a cat", "endings": ["sat", "mat", "ran"], "label": "2", "activity_label": "pets"},
    {"query": "a cat", "choices": ["sat", "mat", "ran"], "gold": 2, "id": 7},
    {"question": "a cat", "options": ["sat", "mat", "ran"], "answer": 2},
  ],
)
def test_names_of_fields(tmp_path, row):
  other = {"context": "", "choices": ["é", " b"], "answer": 0}
  path = write(tmp_path / "x.jsonl", row, other)
  expected = [Question("a cat", ("sat", "mat", "ran"), 2), Question("", ("é", " b"), 0)]
  assert read_questions(path) == expected
  path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().removesuffix(b"\n"))
  assert read_questions(str(path)) == expected


@pytest.mark.parametrize(
  "row, message",
  [
    ("{", "JSON in line 2 of .*x.jsonl, got: "),
    ("", "JSON in line 2"),
    ("[" * 100000, "JSON in line 2"),
    ("[3]", r"a JSON object in line 2 .*, got \[3\]"),
    ({"choices": ["a", "b"], "answer": 0}, "one field of context, ctx, .* in line 2 .* got none"),
    (GOOD | {"ctx": "b"}, "one field of context, .* in line 2 .*, got context and ctx"),
    (GOOD | {"context": 3}, "a text as the context of line 2 .*, got 3"),
    (GOOD | {"choices": "ab"}, 'at least 2 texts, .* as choices of line 2 .*, got "ab"'),
    (GOOD | {"choices": ["ab"]}, "at least 2 texts"),
    (GOOD | {"choices": ["a", "", "b"]}, "at least 2 texts, none of them empty"),
    (GOOD | {"choices": ["a", 3, "b"]}, "at least 2 texts"),
    (GOOD | {"answer": 3}, "0 to 2 as answer of line 2 of .*, got 3"),
    (GOOD | {"answer": -1}, "0 to 2 as answer"),
    (GOOD | {"answer": "B"}, '0 to 2 as answer of line 2 .*, got "B"'),
    (GOOD | {"answer": True}, "0 to 2 as answer of line 2 .*, got true"),
    (GOOD | {"answer": 1.0}, "0 to 2 as answer"),
  ],
)
def test_a_line_that_is_no_question(tmp_path, row, message):
  path = write(tmp_path / "x.jsonl", GOOD, row, GOOD)
  with pytest.raises(ValueError, match=f"^choices: expected {message}"):
    read_questions(path)


def test_a_file_that_has_none(tmp_path):
  with pytest.raises(ValueError, match="choices: expected to read .*x.jsonl, got: No such file"):
    read_questions(tmp_path / "x.jsonl")
  (tmp_path / "x.jsonl").write_text("\n\n")
  with pytest.raises(ValueError, match="choices: expected a question a line in .*, got none"):
    read_questions(tmp_path / "x.jsonl")
  (tmp_path / "x.jsonl").write_bytes(b"\xff")
  with pytest.raises(ValueError, match="choices: expected UTF-8 in .*x.jsonl"):
    read_questions(tmp_path / "x.jsonl")
