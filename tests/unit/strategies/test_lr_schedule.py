"""Learning-rate schedules by hand, and across a resume."""

import math

import pytest
import torch

from rlhf_core.strategies.lr_schedule import load_scheduler, lr_factor, make_scheduler, save_scheduler


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_factors_by_hand(schedule, factors):
    found = [lr_factor(n, schedule=schedule, warmup_updates=2, total_updates=6) for n in range(6)]
    assert found == pytest.approx(factors)


def test_without_warm_up_the_first_update_has_the_peak_rate():
    assert lr_factor(0, schedule="linear", warmup_updates=0, total_updates=4) == 1


def test_a_run_that_is_all_warm_up_does_not_divide_by_zero():
    assert lr_factor(3, schedule="linear", warmup_updates=3, total_updates=3) == 1
    assert lr_factor(9, schedule="cosine", warmup_updates=3, total_updates=3) == pytest.approx(0)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_resumed_schedule_goes_on_where_it_was(tmp_path, schedule):
    def new():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return optimizer, make_scheduler(optimizer, schedule=schedule, warmup_updates=2, total_updates=8)

    def rates(pair, steps):
        optimizer, scheduler = pair
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    straight = rates(new(), 8)
    first = new()
    begun = rates(first, 3)
    save_scheduler(first[1], tmp_path / "schedule")
    second = new()
    second[0].param_groups[0]["lr"] = first[0].param_groups[0]["lr"]  # as the optimizer's own file says
    load_scheduler(second[1], tmp_path / "schedule")
    assert begun + rates(second, 5) == pytest.approx(straight)
