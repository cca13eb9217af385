"""Every number of the papers' tables, and a configuration for each."""

import importlib
import inspect
import re

import pytest

from dpjax import config as config_lib
from reproduce import papers

# By hand from the papers, in the order of the tables: a lost row is missed here.
NUM_ROWS = dict(zip(papers.TABLES, (13, 8, 6, 24, 24, 48, 6, 15, 35), strict=True))
ROWS = {(table.name, row.name): row for table in papers.TABLES.values() for row in table.rows}


def load(row):
  file, _, variant = row.config.partition(":")
  module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
  takes_one = bool(inspect.signature(module.get_config).parameters)
  assert takes_one or not variant
  return module, module.get_config(*([variant] if takes_one else []))


@pytest.mark.parametrize("name", papers.TABLES)
def test_every_row_has_a_configuration_that_is_valid(name):
  table = papers.TABLES[name]
  names = [row.name for row in table.rows]
  assert len({*names}) == len(names) == NUM_ROWS[name]
  for config in {row.config: row for row in table.rows}.values():
    config_lib.check(load(config)[1])
  for row in table.rows:
    assert set(row.paper) <= set(table.scores)
    assert row.place or name not in ("extractors-fig10", "extractors-fig11", "pooling-fig4")
    assert not row.after or row.after in names


def test_the_numbers_of_a_row_stand_in_its_configuration_too():
  checked = 0
  for (table, _), row in ROWS.items():
    said = load(row)[0].__doc__ or ""
    for score, number in row.paper.items():
      if score != papers.FACTOR:
        digits = 2 if score == papers.PERPLEXITY else 3
        # Of two starred ones the header of Table 2 has the bare number.
        assert re.search(rf"(?<!\d){number:.{digits}f}", said), (table, row)
        checked += 1
  assert checked == 12 + 48 + 6
