"""Text corpora of TensorFlow Datasets, as the name tfds:NAME or tfds:NAME/CONFIG.

Takes the feature "text" of each example of the dataset's train, validation and test, with a line
end. Many builders need no TensorFlow (https://www.tensorflow.org/datasets/tfless_tfds).
"""

from collections.abc import Iterator
from typing import Any

from dpjax.data.sources import Files, Source
from dpjax.errors import UserError

PREFIX = "tfds:"
SPLITS = {"train": "train", "validation": "valid", "valid": "valid", "test": "test"}
BATCH = 1024  # examples; one by one takes thirty times as long


def source(name: str) -> Source:
  """The corpus for a name that begins with `PREFIX`."""

  def read(files: Files) -> Iterator[tuple[str, str]]:
    import tensorflow_datasets as tfds

    folder = str(files.folder / "tfds")
    config = tfds.download.DownloadConfig(manual_dir=files.manual_dir, try_download_gcs=False)
    try:
      # array_record needs no TensorFlow.
      builder: Any = tfds.builder(
        name.removeprefix(PREFIX), data_dir=folder, file_format="array_record"
      )
      builder.download_and_prepare(download_dir=f"{folder}/downloads", download_config=config)
      for split in (x for x in SPLITS if x in builder.info.splits):
        examples = builder.as_data_source(split)
        for begin in range(0, len(examples), BATCH):
          for example in examples.__getitems__(range(begin, min(begin + BATCH, len(examples)))):
            yield SPLITS[split], example["text"].decode().removesuffix("\n") + "\n"
    # Builders raise anything; errors of the disk are reported elsewhere.
    except Exception as error:
      if isinstance(error, OSError) and error.errno:
        raise
      said = str(error).partition("\n")[0]  # The rest may list all known names.
      raise UserError(
        "data.name: expected a corpus with a feature text that TensorFlow Datasets can make here, "
        f"got {name} ({type(error).__name__}: {said})"
      ) from error

  return Source(name, read, "its own", "not known", "tensorflow.org/datasets")
