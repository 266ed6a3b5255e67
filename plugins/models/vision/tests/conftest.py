"""A tiny random model of each family, as a folder."""

import pytest
from seeing_models import FAMILIES, Seeing, write_folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("model") / family
            write_folder(family, made[family])
        return made[family]

    return folder


@pytest.fixture
def open_model(folders):
    return lambda family: Seeing(folders(family))


SLOW = {"smolvlm": "idefics3", "qwen2_vl": "qwen2_5_vl", "internvl": "llava"}
"""Family of the slow tests -> the one of `make test` whose model takes the same arguments."""


@pytest.fixture(params=[pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in FAMILIES])
def seeing(request, open_model):
    return open_model(request.param)
