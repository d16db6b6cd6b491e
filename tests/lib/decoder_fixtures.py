"""Fixtures of tests/decoder and tests/checkpoints. conftest.py names this file as a plugin."""

import decoder_folders
import pytest
from decoder_runs import example


@pytest.fixture(scope="session")
def generate():
    return example("generate")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The example's own folder, not to be changed."""
    return example("decoder.tiny").write(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def folder(tmp_path):
    """Mixtral's fixture, to be changed."""
    return decoder_folders.copied("mixtral", tmp_path)


@pytest.fixture
def at_once(monkeypatch):
    """Files that were written a moment ago are read without waiting for the clock's next tick: no
    such test changes a file that it has opened."""
    monkeypatch.setattr("jax_groupgemm.checkpoints.files.settle", lambda stamp: None)
