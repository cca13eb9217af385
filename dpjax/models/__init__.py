"""Whole models, and how a configuration becomes one."""
