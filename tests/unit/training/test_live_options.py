"""Learning rates and the KL coefficient while a run goes on, and what a checkpoint keeps of them."""

import pytest
import torch
from torch import nn

from rlhf_core.config.sections import OptimizerConfig
from rlhf_core.errors import UserInputError
from rlhf_core.strategy import TrainedModel
from rlhf_core.training.live_options import LiveOptions


class Algorithm:
    """Takes `kl_coef`."""

    def __init__(self):
        self.options = {}

    def set_option(self, name, value):
        self.options[name] = value


def trained(lr):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return TrainedModel(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0))


def rates(models):
    return {role: each.optimizer.param_groups[0]["lr"] for role, each in models.items()}


@pytest.fixture
def make_options():
    def make(roles=("policy", "critic"), **config):
        sections = OptimizerConfig.model_validate({"lr": 0.1, **config})
        peaks = {"policy": sections.lr, "critic": sections.critic_lr or sections.lr}
        models = {role: trained(peaks[role]) for role in roles}
        return LiveOptions(sections, models, Algorithm()), models

    return make


@pytest.mark.parametrize(("config", "critic"), [({}, 0.05), ({"critic_lr": 0.2}, 0.2)])
def test_the_critic_follows_the_policy_unless_it_has_a_rate_of_its_own(make_options, config, critic):
    options, models = make_options(**config)
    assert "optimizer.lr is 0.05" in options.set("optimizer.lr", 0.05)
    assert rates(models) == pytest.approx({"policy": 0.05, "critic": critic})


def test_the_critics_rate_is_set_by_itself_where_there_is_a_critic(make_options):
    options, models = make_options()
    options.set("optimizer.critic_lr", 0.3)
    assert rates(models) == pytest.approx({"policy": 0.1, "critic": 0.3})
    without, _ = make_options(roles=("policy",))
    with pytest.raises(UserInputError, match="trains no critic"):
        without.set("optimizer.critic_lr", 0.3)


def test_a_rate_of_zero_cannot_be_raised(make_options):
    options, _ = make_options(lr=0.0)
    with pytest.raises(UserInputError, match="is 0 in the run file"):
        options.set("optimizer.lr", 0.1)


def test_no_other_option_can_be_set(make_options):
    options, _ = make_options()
    with pytest.raises(UserInputError, match="optimizer.lrr cannot be set, only algorithm.kl_coef, optimizer.lr, "):
        options.set("optimizer.lrr", 0.1)


def test_slowing_down_multiplies_what_was_set(make_options):
    options, models = make_options()
    options.set("optimizer.lr", 0.05)
    options.slow_down(0.5)
    assert rates(models) == pytest.approx({"policy": 0.025, "critic": 0.025})
    assert options.lr_factors == pytest.approx({"policy": 0.25, "critic": 0.25})


def test_what_was_changed_comes_back_from_a_checkpoint(make_options):
    before, _ = make_options()
    before.set("optimizer.lr", 0.05)
    before.set("algorithm.kl_coef", 0.3)
    after, models = make_options()
    assert after.describe() == ""
    after.restore(before.lr_factors, before.settings)
    assert rates(models) == pytest.approx({"policy": 0.05, "critic": 0.05})
    assert after.settings == {"kl_coef": 0.3}
    assert after.describe() == "learning rate of the policy x 0.5, learning rate of the critic x 0.5, kl_coef 0.3"
