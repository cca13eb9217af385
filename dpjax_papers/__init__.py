"""The papers' corpora, cleaning and tables: a plugin of dpjax."""
