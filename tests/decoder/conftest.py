"""What tests of examples/generate.py share."""

import decoder_folders
import pytest
from test_decoder import example


@pytest.fixture(scope="module")
def generate():
    return example("generate")


@pytest.fixture(scope="module")
def tiny(generate, tmp_path_factory):
    return generate.tiny.write(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def folder(tmp_path):
    """Mixtral's fixture, to be changed."""
    return decoder_folders.copied("mixtral", tmp_path)
