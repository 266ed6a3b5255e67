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


@pytest.fixture(params=FAMILIES)
def seeing(request, open_model):
    return open_model(request.param)
