"""Experiments made small, and the texts that they find."""

import pytest

from dpjax import config as config_lib
from reproduce import papers, scales

CONFIGS = sorted({row.config for table in papers.TABLES.values() for row in table.rows})


@pytest.mark.parametrize("scale", scales.SCALES)
def test_every_experiment_can_be_run_at_every_scale(scale):
  for name in CONFIGS:
    config = scales.configure(name, scale)
    config_lib.check(config)
    assert scale != "tiny" or config.data.name == "python_manual", name
    changes = scales.changes(name, scale)
    assert bool(changes) == (scale != "paper"), name
    assert not {key for key in changes if key.startswith(("seed", "sample", "data.path"))}


@pytest.mark.parametrize("table", papers.TABLES)
def test_what_a_table_compares_stays_different(table):
  names = {row.config for row in papers.TABLES[table].rows}
  settings = {str(config_lib.flatten(scales.configure(name, "cpu"))) for name in names}
  assert len(settings) == len(names)


def test_texts_are_found_by_name(tmp_path):
  for name in ("wikitext2", "wikitext2_raw", "wikitext103_raw"):
    (tmp_path / name).mkdir()
  for name in ("text8_prefix", "wiki40b_fi_books", "wiki40b_he", "wiki40b_he_less"):
    (tmp_path / f"{name}.txt").write_text("a text\n")

  def found(name):
    config = config_lib.default()
    config.data.name = name
    text, path = scales.find_text(config, tmp_path)
    assert path is not None and text in (path.name.removesuffix(".txt"), path.parent.name)
    assert scales.find_text(config, "")[1] is None
    return path.name

  assert found("wikitext2") == "wikitext2"
  # A part of a text, or another one in its place, says so in its name.
  assert found("text8") == "text8_prefix.txt"
  assert found("wiki40b_fi") == "wiki40b_fi_books.txt"
  assert found("wiki40b_he") == "wiki40b_he.txt"
  # Tokens in place of the text.
  (tmp_path / "wikitext2" / "characters").mkdir()
  assert found("wikitext2") == "characters"
  (tmp_path / "wikitext2" / "characters").rmdir()
  for missing in ("lm1b", "wiki40b_vi", "wikitext103"):
    with pytest.raises(ValueError, match="data: expected a folder .* got none"):
      found(missing)
  (tmp_path / "text8_more").mkdir()
  with pytest.raises(ValueError, match="got text8_more, text8_prefix.txt"):
    found("text8")
