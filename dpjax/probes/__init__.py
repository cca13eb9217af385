"""Probes of long-range recall: synthetic tasks with accuracy by distance."""
