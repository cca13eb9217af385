"""Pallas kernels behind the functions of `dpjax.ops`; each is imported where it is used."""
