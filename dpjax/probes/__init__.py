"""Probes of long-range recall: tasks without text, by the distance of what is to be recalled."""
