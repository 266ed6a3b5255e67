"""The state of any torch optimizer in a checkpoint, and optimizers that no strategy could prepare."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_core.components import StrategyContext
from rlhf_core.config import StrategyConfig
from rlhf_core.config.load import load_run
from rlhf_core.config.resolve import resolve
from rlhf_core.errors import CheckpointError, PluginError
from rlhf_core.wiring.models import make_optimizer
from rlhf_strategies import StrategyBase
from rlhf_testing.runs import tiny_run


class Counting(torch.optim.Optimizer):
    """Keeps what plugins keep: tensors of the parameter's shape and of others, numbers, and a number of the group."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "scale": 1.0, "momentum": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["scale"] *= 2
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("rows", torch.zeros(parameter.shape[0])).add_(parameter.grad.norm())
                state.setdefault("moving", torch.zeros_like(parameter)).lerp_(parameter.grad, group["momentum"])
                state["step"] = state.get("step", 0) + 1
                state["norm"] = state.get("norm", torch.zeros(())) + parameter.grad.norm()
                parameter.sub_(state["moving"] * group["lr"] * group["scale"] / state["step"] / state["norm"])


def make(name):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    kinds = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
        "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
        "counting": lambda params: Counting(params, 0.1),
    }
    strategy = StrategyBase(StrategyConfig(), StrategyContext(device="cpu"))
    trained = strategy.prepare(model, kinds[name](model.parameters()))
    return strategy, trained


def update(pair, count):
    strategy, trained = pair
    for n in range(count):
        inputs = torch.arange(6.0).view(2, 3) + n
        strategy.backward(trained.model(inputs).square().mean(), trained.optimizer)
        strategy.step(trained)
    return [parameter.detach().clone() for parameter in trained.model.parameters()]


@pytest.mark.parametrize("name", ["sgd", "adafactor", "rmsprop", "counting"])
def test_a_resumed_optimizer_continues_bit_for_bit(tmp_path, name):
    torch.manual_seed(0)
    first = make(name)
    update(first, 2)
    first[0].save_model(first[1].model, tmp_path)
    first[0].save_optimizer(first[1].optimizer, tmp_path)
    straight = update(first, 2)
    second = make(name)
    second[0].load_model(second[1].model, tmp_path)
    second[0].load_optimizer(second[1].optimizer, tmp_path)
    assert all(map(torch.equal, straight, update(second, 2)))
    second[0].load_model(second[1].model, tmp_path)
    second[0].load_optimizer(second[1].optimizer, tmp_path)  # as a rollback does
    assert all(map(torch.equal, straight, update(second, 2)))
    for mine, theirs in zip(*(each[1].optimizer.state.values() for each in (first, second)), strict=True):
        assert {key: type(value) for key, value in mine.items()} == {key: type(value) for key, value in theirs.items()}


def test_state_of_another_shape_is_refused_where_parameters_are_sharded(tmp_path, monkeypatch):
    strategy, trained = make("adafactor")
    update((strategy, trained), 1)
    monkeypatch.setattr(StrategyBase, "shards_parameters", True)
    with pytest.raises(CheckpointError, match="Adafactor keeps 'row_var'"):
        strategy.save_optimizer(trained.optimizer, tmp_path)


PARTIAL = """
    import torch
    from rlhf_core import Component, Section
    class Nothing(Section): ...
    def partial(config, context):
        return torch.optim.SGD(list(context.parameters.values())[:1], lr=context.lr)
    def early(config, context):
        return torch.optim.Adagrad(context.parameters.values(), lr=context.lr)
    def no_optimizer(config, context):
        return 7
    partly = Component("One.", Nothing, "acme_bad:partial")
    early_state = Component("Early.", Nothing, "acme_bad:early")
    no_one = Component("None.", Nothing, "acme_bad:no_optimizer")
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("partly", "does not hold exactly the parameters"),
        ("early-state", "has state before its first step"),
        ("no-one", r"which is not a torch\.optim\.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_prepared_names_the_plugin(install, name, problem):
    names = {each: f"acme_bad:{each.replace('-', '_')}" for each in ("partly", "early-state", "no-one")}
    install("acme-bad", {"rlhf.optimizers": names}, {"acme_bad": PARTIAL})
    resolved = resolve(load_run(tiny_run({"optimizer": {"name": name, "lr": 0.1}})))
    with pytest.raises(PluginError, match=problem) as caught:
        make_optimizer(resolved, "policy", torch.nn.Linear(2, 2), SimpleNamespace())
    assert f'optimizer "{name}" (acme-bad 1.2.3)' in caught.value.where


def test_a_rollback_undoes_what_the_optimizer_changed_in_its_group_since(tmp_path):
    strategy, trained = make("counting")
    strategy.save_optimizer(trained.optimizer, tmp_path)
    update((strategy, trained), 2)
    assert trained.optimizer.param_groups[0]["scale"] == 4.0
    strategy.load_optimizer(trained.optimizer, tmp_path)
    assert trained.optimizer.param_groups[0]["scale"] == 1.0 and not any(trained.optimizer.state.values())
