"""The named corpora, one module each: their origin and the code that reads their text.

Each module has `SOURCES`, by name. `Source.read` gets its files, from the manual folder or by
download, and yields pairs of split and text, in pieces of any size:

  def read(files: Files):
    path = files.get(File("https://host/text.zip"))
    for split in ("train", "valid", "test"):
      for piece in reading.zip_member(path, f"{split}.txt"):
        yield split, piece

  data.register_corpus("mine", Source("A text of mine", read, "public domain", "3 MB", "me"))
"""
