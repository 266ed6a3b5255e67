"""Forwards that are replaced for a while come back, also where several contexts replace the same one."""

import pytest
from torch import nn

from rlhf_forward.replaced_forwards import forwards_of, replaced_forwards


def test_what_was_in_place_before_comes_back() -> None:
    module = nn.Identity()
    with replaced_forwards([(module, lambda x: x + 1)]):
        with replaced_forwards([(module, lambda x: x + 2)]):
            assert module(0) == 2
        assert module(0) == 1
    assert module(0) == 0 and "forward" not in vars(module)


def test_a_module_of_two_models_is_restored_once() -> None:
    shared = nn.Identity()
    models = [nn.Sequential(shared), nn.Sequential(shared)]
    found = forwards_of(models, lambda module: isinstance(module, nn.Identity), lambda module, x: x + 1)
    with replaced_forwards(found):
        assert models[0](0) == models[1](0) == 1
        assert not forwards_of(models, lambda module: isinstance(module, nn.Identity), lambda module, x: x)
    assert "forward" not in vars(shared)


def test_an_error_inside_restores_too() -> None:
    module = nn.Identity()
    with pytest.raises(KeyError), replaced_forwards([(module, lambda x: x + 1)]):
        raise KeyError
    assert "forward" not in vars(module)
