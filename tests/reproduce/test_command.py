"""The command as it is started, in processes of its own."""

import subprocess
import sys

from reproduce import papers, report
from tests import helpers


def started(*arguments, cwd=helpers.ROOT, program=("-m", "reproduce")):
  return subprocess.run(
    [sys.executable, *program, *map(str, arguments)],
    cwd=cwd,
    env=helpers.environment(),
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )


def test_what_is_missing_is_told_and_the_rest_goes_on(tmp_path):
  (tmp_path / "texts").mkdir()
  done = started(
    "extractors-table7,extractors-fig7",
    "--scale=cpu",
    f"--out={tmp_path / 'out'}",
    f"--data={tmp_path / 'texts'}",
    f"--runs={tmp_path / 'runs'}",
  )
  assert done.returncode == 1 and "Traceback" not in done.stderr
  count = len(papers.TABLES["extractors-fig7"].rows)
  assert f"{count} without a result:" in done.stderr
  assert "attention_64, seed 0: data: expected a folder childrens_books" in done.stderr
  assert len(list((tmp_path / "out").glob("*_reduced_cpu.json"))) == 2


def test_wrong_input_ends_with_a_message(tmp_path):
  # tests/test_hostile.py has those that need no process of their own.
  done = started("all", "--scal=tiny", f"--out={tmp_path}")
  assert done.returncode == 1 and "Unknown command line flag 'scal'" in done.stderr
  assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_the_page_is_made_of_the_reports(tmp_path):
  (tmp_path / "docs").mkdir()
  out = tmp_path / "results/reproduce"
  report.write(report.counts(papers.TABLES["extractors-table7"], "paper"), out)
  done = started("report", cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  page = (tmp_path / "docs/reproduce.md").read_text()
  assert "extractors-table7" in page and "139,476,992" in page
  (tmp_path / "docs/reproduce.md").unlink()
  (tmp_path / "docs").rmdir()
  done = started("report", cwd=tmp_path)
  assert done.returncode == 1 and "docs/reproduce.md" in done.stderr


def test_a_signal_ends_it_with_its_status_and_the_reports_are_written(tmp_path):
  code = (
    "import runpy\n"
    "from dpjax.errors import Interrupted\n"
    "from reproduce import work\n"
    "def run(self):\n"
    "  raise Interrupted(3, 7, 15)\n"
    "work.Work.run = run\n"
    "runpy.run_module('reproduce', run_name='__main__', alter_sys=True)\n"
  )
  done = started("extractors-table7", "--scale=tiny", f"--out={tmp_path}", program=("-c", code))
  assert done.returncode == 143, done.stderr
  assert "139,476,992" in done.stdout and "The reports are in" in done.stdout
  assert done.stdout.endswith(
    "Stopped at step 3 of 7, which is saved. The same command goes on from there.\n"
  )
  assert len([*tmp_path.iterdir()]) == 2
