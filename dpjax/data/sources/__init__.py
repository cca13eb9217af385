"""The corpora that have a name, a file each: what they are, and how their text is made.

Each of the modules has `SOURCES`, by name. A source's generator takes the files that it
asks for, in the manual folder or downloaded, to pairs of split and text, in any pieces:

  def read(files: Files):
    path = files.get(File("https://host/text.zip"))
    for split in ("train", "valid", "test"):
      for piece in reading.zip_member(path, f"{split}.txt"):
        yield split, piece

  data.register_corpus("mine", Source("A text of mine", read, "public domain", "3 MB", "me"))
"""
