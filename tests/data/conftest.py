"""One web site for all tests of data."""

import os

import pytest

from tests import hub


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
  monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="session")
def server():
  with hub.running() as server:
    yield server


@pytest.fixture
def site(server, tmp_path, monkeypatch):
  monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two tries of a download
  hub.use(monkeypatch, server.url, tmp_path / "cache")
  server.clear()
  return server
