"""WikiText-2 and WikiText-103: good and featured articles of Wikipedia."""

import io
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from dpjax.data.builders.base import TextBuilder
from dpjax.data.download import File
from dpjax.errors import UserError

# The first author's own address: the one on Amazon S3 is gone, and this one has the same
# files (issue 1284 of github.com/ooples/AiDotNet, pull request 11 of
# github.com/IST-DASLab/Quartet). Checksums and sizes are those of the files on S3:
# datasets/wikitext/dataset_infos.json of github.com/huggingface/datasets.
ADDRESS = "https://wikitext.smerity.com"


class WikiText2(TextBuilder, skip_registration=True):
  """WikiText-2, tokenised: 720 articles, rare words as `<unk>`, numbers as `1 @,@ 000`.

  As in the archive: a paragraph, heading or nothing a line, with a space at either end.
  With one `<eos>` a line 2,088,628, 217,646 and 245,569 tokens for training, validation
  and test, and 33,278 different ones.

  Source: Merity et al. 2016, "Pointer Sentinel Mixture Models", arxiv.org/abs/1609.07843,
  Table 1. Licence: CC BY-SA (3.0 by the paper's page, 4.0 by its later copies).
  """

  name = "wikitext2"
  FILES = (
    File(
      f"{ADDRESS}/wikitext-2-v1.zip",
      checksum="sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
      size=4_475_746,
    ),
  )
  MEMBER = "wikitext-2/wiki.{}.tokens"

  def texts(self, get):
    """The three members of the archive, line by line."""
    path = get(self.FILES[0])
    stems = {"train": "train", "validation": "valid", "test": "test"}
    return {split: _read(path, self.MEMBER.format(stem)) for split, stem in stems.items()}


class WikiText103(WikiText2, skip_registration=True):
  """WikiText-103, tokenised: 28,595 articles; validation and test are WikiText-2's own.

  All as in `WikiText2`, but 103,227,021 training tokens and 267,735 different ones.
  """

  name = "wikitext103"
  FILES = (
    File(
      f"{ADDRESS}/wikitext-103-v1.zip",
      checksum="sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
      size=190_229_076,
    ),
  )
  MEMBER = "wikitext-103/wiki.{}.tokens"


class WikiText2Raw(WikiText2, skip_registration=True):
  """WikiText-2 as it was before the rare words were replaced."""

  name = "wikitext2_raw"
  FILES = (
    File(
      f"{ADDRESS}/wikitext-2-raw-v1.zip",
      checksum="sha256:ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
      size=4_721_645,
    ),
  )
  MEMBER = "wikitext-2-raw/wiki.{}.raw"


class WikiText103Raw(WikiText2, skip_registration=True):
  """WikiText-103 as it was before the rare words were replaced."""

  name = "wikitext103_raw"
  FILES = (
    File(
      f"{ADDRESS}/wikitext-103-raw-v1.zip",
      checksum="sha256:91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
      size=191_984_949,
    ),
  )
  MEMBER = "wikitext-103-raw/wiki.{}.raw"


def _read(path: Path, member: str) -> Iterator[str]:
  """The lines of a member of a zip archive, their ends included."""
  try:
    with zipfile.ZipFile(path) as archive, archive.open(member) as file:
      yield from io.TextIOWrapper(file, encoding="utf-8", newline="\n")
  except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, UnicodeDecodeError) as error:
    raise UserError(
      f"{path}: expected a zip archive with {member} in UTF-8, got {error}"
    ) from error
