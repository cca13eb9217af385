"""The papers' corpora and tools: a plugin of dpjax, found by its entry point like any other."""
