"""Texts, their tokens on disk, and batches of them."""
