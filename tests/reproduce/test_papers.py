"""Every number of the papers' tables, a configuration for each at every scale, and its text."""

import importlib
import re

import pytest

import dpjax
from reproduce import papers, scales

# By hand from the papers, in the order of the tables: a lost row is missed here.
NUM_ROWS = dict(zip(papers.TABLES, (13, 8, 6, 24, 24, 48, 6, 15, 35), strict=True))
ROWS = {(table.name, row.name): row for table in papers.TABLES.values() for row in table.rows}
CONFIGS = sorted({row.config for row in ROWS.values()})


@pytest.mark.parametrize("name", papers.TABLES)
def test_every_row_is_named_once_and_has_what_the_table_shows(name):
  table = papers.TABLES[name]
  names = [row.name for row in table.rows]
  assert len({*names}) == len(names) == NUM_ROWS[name]
  for row in table.rows:
    assert set(row.paper) <= set(table.scores)
    assert row.place or name not in ("extractors-fig10", "extractors-fig11", "pooling-fig4")
    assert not row.after or row.after in names


def test_the_numbers_of_a_row_stand_in_its_configuration_too():
  checked = 0
  for (table, _), row in ROWS.items():
    file = row.config.partition(":")[0].removesuffix(".py")
    header = importlib.import_module(file.replace("/", ".")).__doc__ or ""
    for score, number in row.paper.items():
      if score != papers.FACTOR:
        digits = 2 if score == papers.PERPLEXITY else 3
        # Of two starred ones the header of Table 2 has the bare number.
        assert re.search(rf"(?<!\d){number:.{digits}f}", header), (table, row)
        checked += 1
  assert checked == 12 + 48 + 6


@pytest.mark.parametrize("scale", scales.SCALES)
def test_every_experiment_can_be_run_at_every_scale(scale):
  for name in CONFIGS:
    config = scales.configure(name, scale)
    dpjax.config.check(config)
    assert scale != "tiny" or config.data.name == "python_manual", name
    changes = scales.changes(name, scale)
    assert bool(changes) == (scale != "paper"), name
    assert not {key for key in changes if key.startswith(("seed", "sample", "data.path"))}


@pytest.mark.parametrize("table", papers.TABLES)
def test_what_a_table_compares_stays_different(table):
  names = {row.config for row in papers.TABLES[table].rows}
  settings = {str(dpjax.config.flatten(scales.configure(name, "cpu"))) for name in names}
  assert len(settings) == len(names)


def test_texts_are_found_by_name(tmp_path):
  (tmp_path / "wikitext2" / "characters").mkdir(parents=True)
  (tmp_path / "wikitext2_raw").mkdir()
  for name in ("text8_prefix", "wiki40b_fi_books", "wiki40b_he", "wiki40b_he_less"):
    (tmp_path / f"{name}.txt").write_text("a text\n")
  config = dpjax.config.default()

  def find(name):
    config.data.name = name
    assert scales.find_text(config, None)[1] is None
    text, path = scales.find_text(config, tmp_path)
    return text, str(path.relative_to(tmp_path))

  # Tokens in place of the text; a part of a text, or another one in its place, by its name.
  assert find("wikitext2") == ("wikitext2", "wikitext2/characters")
  assert find("wikitext2_raw") == ("wikitext2_raw", "wikitext2_raw")
  for name, expected in (("text8", "text8_prefix"), ("wiki40b_he", "wiki40b_he")):
    assert find(name) == (expected, f"{expected}.txt")
  for missing in ("lm1b", "wiki40b_vi", "wikitext103"):
    with pytest.raises(ValueError, match="data: expected a folder .* got none"):
      find(missing)
  (tmp_path / "text8_more").mkdir()
  with pytest.raises(ValueError, match="got text8_more, text8_prefix.txt"):
    find("text8")
