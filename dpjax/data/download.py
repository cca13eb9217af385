"""Files from the internet: resumed, retried, checked, or given by hand."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class File:
  """A file that can be downloaded.

  Attributes:
    url: from where, http or https.
    name: in the folder; "": the last part of the URL.
    checksum: "sha256:..." or "md5:...", of a source that can be cited; "": what the
      first download gave is written down and compared ever after.
    size: bytes, or 0 where they are not known.
    head_bytes: 0, or to fetch so many bytes from the beginning alone.
  """

  url: str
  name: str = ""
  checksum: str = ""
  size: int = 0
  head_bytes: int = 0


def download(
  file: File,
  folder: Path,
  *,
  manual_dir: Path | None = None,
  progress: bool = True,
) -> Path:
  """Finds the file in `manual_dir` or `folder`, or downloads it into `folder`."""
  raise NotImplementedError
