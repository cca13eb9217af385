"""Every table of the other two papers, run at the scale "tiny"."""

import jax
import pytest

from dpjax.reproduce import papers
from tests.reproduce import tiny

pytestmark = pytest.mark.slow
NAMES = [name for name in papers.TABLES if not name.startswith("pooling")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """One for all, as tables share runs."""
  return tmp_path_factory.mktemp("reproduced")


@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_a_result(name, folder):
  with jax.numpy_dtype_promotion("standard"):
    tiny.check_table(name, folder)
