"""Learning-rate schedules by hand, and across a resume."""

import math

import pytest
import torch

from rlhf_core.config.resolved import Configured
from rlhf_core.errors import PluginError
from rlhf_core.plugins.selected import load
from rlhf_core.wiring.models import make_scheduler
from rlhf_strategies.parts import load_scheduler, save_scheduler


def scheduled(name, warmup_updates, total_updates, **options):
    """An optimizer with a peak rate of 1, and its scheduler."""
    selected = load("schedules", name)
    schedule = Configured.of(selected, selected.component.config(**options))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, make_scheduler(optimizer, schedule, warmup_updates=warmup_updates, total_updates=total_updates)


def rates(pair, steps):
    optimizer, scheduler = pair
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_factors_by_hand(schedule, factors):
    assert rates(scheduled(schedule, 2, 6), 6) == pytest.approx(factors)


def test_without_warm_up_the_first_update_has_the_peak_rate():
    assert rates(scheduled("linear", 0, 4), 1) == [1]


def test_a_run_that_is_all_warm_up_does_not_divide_by_zero():
    assert rates(scheduled("linear", 3, 3), 4)[3] == 1
    assert rates(scheduled("cosine", 3, 3), 10)[9] == pytest.approx(0)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_resumed_schedule_continues(tmp_path, schedule):
    straight = rates(scheduled(schedule, 2, 8), 8)
    first = scheduled(schedule, 2, 8)
    begun = rates(first, 3)
    save_scheduler(first[1], tmp_path / "schedule")
    second = scheduled(schedule, 2, 8)
    second[0].param_groups[0]["lr"] = first[0].param_groups[0]["lr"]  # as the optimizer's own file says
    load_scheduler(second[1], tmp_path / "schedule")
    assert begun + rates(second, 5) == pytest.approx(straight)


def test_a_factor_that_is_no_rate_names_the_plugin(install):
    source = """
        from rlhf_core import Component, Section
        class Nothing(Section): ...
        def build(config, context):
            return lambda update: 1.0 - update
        steep = Component("Below zero.", Nothing, "acme_steep:build")
    """
    install("acme-steep", {"rlhf.schedules": {"steep": "acme_steep:steep"}}, {"acme_steep": source})
    with pytest.raises(PluginError, match=r"factor for update 2 is -1\.0") as caught:
        rates(scheduled("steep", 0, 8), 3)
    assert "acme-steep" in caught.value.where
