"""Moments in one block are those that AdamW makes itself, and steps with them are its own."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from rlhf_core.util.tensor_files import load_tree, save_tree
from rlhf_strategies.parts import LossScale, begin_moments, make_adamw, torch_step

OPTIONS = (1e-2, (0.9, 0.99), 1e-8, 0.1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3))


def put_gradients(module: nn.Module, number: int) -> None:
    """All but the last layer's, which appears with the second step."""
    for index, param in enumerate(module.parameters()):
        if index < 4 or number:
            param.grad = torch.sin(torch.arange(param.numel(), dtype=torch.float32) + index + number).view(param.shape)


def test_steps_are_those_of_torch() -> None:
    ours, theirs = model(), model()
    mine, its = make_adamw(ours.parameters(), *OPTIONS), make_adamw(theirs.parameters(), *OPTIONS)
    for number in range(3):
        put_gradients(ours, number)
        put_gradients(theirs, number)
        torch_step(mine, None, None, LossScale(enabled=False))
        its.step()
        its.zero_grad()
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(param, other)
            assert mine.state.get(param, {}).keys() == its.state.get(other, {}).keys()
            for key, value in mine.state.get(param, {}).items():
                assert torch.equal(value, its.state[other][key]) and value.shape == its.state[other][key].shape


def test_each_kind_of_moment_is_one_block() -> None:
    module = model()
    optimizer = make_adamw(module.parameters(), *OPTIONS)
    put_gradients(module, 0)
    begin_moments(optimizer)
    stepped = list(module.parameters())[:4]
    assert set(optimizer.state) == set(stepped)
    for key in ("exp_avg", "exp_avg_sq"):
        tensors = [optimizer.state[param][key] for param in stepped]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        assert all(tensor.data_ptr() % 64 == tensors[0].data_ptr() % 64 for tensor in tensors)
    kept = optimizer.state[stepped[0]]["exp_avg"]
    begin_moments(optimizer)
    assert optimizer.state[stepped[0]]["exp_avg"] is kept


def test_a_block_is_stored_tensor_by_tensor_and_without_a_copy(tmp_path, monkeypatch) -> None:
    module = model()
    optimizer = make_adamw(module.parameters(), *OPTIONS)
    put_gradients(module, 1)
    torch_step(optimizer, None, None, LossScale(enabled=False))
    tree = {str(index): dict(state) for index, state in enumerate(optimizer.state.values())}
    expected = copy.deepcopy(tree)
    monkeypatch.setattr(torch.Tensor, "clone", lambda *given: (_ for _ in ()).throw(AssertionError("a copy")))
    save_tree(tmp_path / "state.safetensors", tree)
    monkeypatch.undo()
    loaded = load_tree(tmp_path / "state.safetensors")
    for name, state in expected.items():
        assert all(torch.equal(loaded[name][key], value) for key, value in state.items())


def test_other_optimizers_and_types_are_left_alone() -> None:
    single, double = model(), model().double()
    others: list[tuple[nn.Module, Optimizer]] = [
        (single, SGD(single.parameters(), lr=0.1)),
        (double, AdamW(double.parameters(), lr=0.1)),
    ]
    for module, optimizer in others:
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        begin_moments(optimizer)
        assert not optimizer.state
