"""Every table of the pooling paper, run at the scale "tiny"."""

import pytest

from reproduce import papers
from tests.reproduce import tiny

pytestmark = pytest.mark.slow
NAMES = [name for name in papers.TABLES if name.startswith("pooling")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """One for all, as tables share runs."""
  return tmp_path_factory.mktemp("reproduced")


@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_a_result(name, folder):
  tiny.check_table(name, folder)


def test_what_is_done_is_not_done_again(folder):
  tiny.check_going_on("pooling-table2", folder)
