"""Muon, 8-bit AdamW and schedules: equal to their references over 50 steps, in runs, and across a resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_wsd_schedule

from rlhf_core import train
from rlhf_core.components import ScheduleContext
from rlhf_core.errors import ConfigError
from rlhf_core.plugins.selected import load
from rlhf_strategies.more_optimizers import MuonConfig
from rlhf_strategies.muon import build as build_muon
from rlhf_strategies.muon import orthogonalized
from rlhf_testing.runs import tiny_run

STEPS = 50


class Net(nn.Module):
    """Matrices, a vector, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed_tokens = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 20), nn.Linear(20, 8, bias=False)
        self.lm_head = nn.Linear(8, 12, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.down(self.up(self.embed_tokens(ids)).tanh()))
        return out


def gradients(net: nn.Module, step: int) -> None:
    ids = torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(step))
    net.zero_grad()
    nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flip(-1).flatten()).backward()


def context(net: nn.Module) -> Any:
    return SimpleNamespace(parameters=dict(net.named_parameters()), lr=0.01, strategy=None)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_is_that_of_torch_over_fifty_steps(adjust: Any, nesterov: bool) -> None:
    ours, theirs = Net(), Net()
    options = {"weight_decay": 0.05, "nesterov": nesterov}
    optimizer = build_muon(MuonConfig(adjust_lr=adjust, betas=(0.9, 0.95), **options), context(ours))
    matrices = [theirs.up.weight, theirs.down.weight]
    others = [theirs.embed_tokens.weight, theirs.up.bias, theirs.lm_head.weight]
    references = [
        torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn=adjust, **options),
        torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.05, foreach=False),
    ]
    for step in range(STEPS):
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.step()
        for each in references:
            each.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_the_iteration_moves_singular_values_close_to_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalized(matrix, 5).float())
    assert values.min() > 0.6 and values.max() < 1.3


def test_which_parameters_muon_trains() -> None:
    net = Net()
    groups = {group["kind"]: group["params"] for group in build_muon(MuonConfig(), context(net)).param_groups}
    assert [id(each) for each in groups["muon"]] == [id(net.up.weight), id(net.down.weight)]
    assert len(groups["adamw"]) == 3


def test_eight_bits_are_those_of_bitsandbytes_over_fifty_steps() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    ours, theirs = nn.Linear(80, 90), nn.Linear(80, 90)
    theirs.load_state_dict(ours.state_dict())
    selected = load("optimizers", "adamw-8bit")
    optimizer = selected.build(selected.component.config(weight_decay=0.01), context(ours))
    reference = bitsandbytes.optim.AdamW8bit(theirs.parameters(), lr=0.01, weight_decay=0.01)
    for step in range(STEPS):
        inputs = torch.randn(7, 80, generator=torch.Generator().manual_seed(step))
        for net, each in ((ours, optimizer), (theirs, reference)):
            net.zero_grad()
            net(inputs).square().mean().backward()
            each.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert optimizer.state[ours.weight]["state1"].dtype == torch.uint8


def factors(name: str, options: dict[str, Any], warmup: int, total: int) -> list[float]:
    selected = load("schedules", name)
    factor = selected.build(selected.component.config(**options), ScheduleContext(warmup, total))
    return [factor(update) for update in range(warmup, total)]


def reference(make: Any, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer, **options)
    found = []
    for _ in range(STEPS):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(("shape", "decay"), [("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt")])
def test_wsd_is_that_of_transformers(shape: str, decay: str) -> None:
    expected = reference(
        get_wsd_schedule,
        num_warmup_steps=5,
        num_decay_steps=10,
        num_training_steps=STEPS,
        min_lr_ratio=0.1,
        decay_type=decay,
    )
    found = factors("wsd", {"decay": 0.2, "shape": shape, "floor": 0.1}, 5, STEPS)
    assert found == pytest.approx(expected[5:], abs=1e-9)


def test_cosine_with_a_floor_is_that_of_transformers() -> None:
    expected = reference(
        get_cosine_with_min_lr_schedule_with_warmup, num_warmup_steps=5, num_training_steps=STEPS, min_lr_rate=0.1
    )
    assert factors("cosine", {"floor": 0.1}, 5, STEPS) == pytest.approx(expected[5:], abs=1e-9)
    assert factors("linear", {"floor": 0.5}, 0, 10)[5] == pytest.approx(0.75)


def run_of(optimizer: Any, **changes: Any) -> dict[str, Any]:
    return tiny_run(
        {
            "algorithm": {"name": "ppo"},
            "engine": {"max_new_tokens": 6},
            "optimizer": {"lr": 1e-3, **optimizer},
            "train": {"episodes": 2, "prompts_per_episode": 4, "train_batch_size": 2},
            "checkpoint": {"every_episodes": 1},
            **changes,
        }
    )


@pytest.mark.parametrize("optimizer", ["muon", "adamw-8bit"])
@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(optimizer: str, tmp_path: Path) -> None:
    if optimizer == "adamw-8bit":
        pytest.importorskip("bitsandbytes")
    run = run_of({"name": optimizer})
    whole = train(run, output=tmp_path / "whole")
    train({**run, "train": {**run["train"], "episodes": 1}}, output=tmp_path / "half")
    resumed = train(run, output=tmp_path / "half", resume="auto")
    assert whole is not None and resumed is not None
    for one, other in zip(whole.metrics, resumed.metrics, strict=True):
        assert one["policy/grad_norm"] == other["policy/grad_norm"] > 0
        assert one["loss/value"] == other["loss/value"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "gemini"}, r"optimizer\.name: strategy gemini supports only adamw, not muon"),
        ({"strategy": "low-level-zero"}, r"supports only adamw, not muon"),
        ({"model": {"dtype": "bfloat16"}}, r"muon does not keep float32 master weights"),
        ({"optimizer": {"name": "adamw-8bit"}, "strategy": "fsdp"}, r"adamw-8bit keeps its state in blocks"),
        ({"optimizer": {"name": "adamw-8bit"}, "strategy": "gemini"}, r"supports only adamw, not adamw-8bit"),
        ({"optimizer": {"name": "muon", "schedule": {"name": "wsd", "decay": 0}}}, r"decay: should be greater than 0"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    run = run_of({"name": "muon"})
    run = {
        key: {**run[key], **changes.pop(key)} if isinstance(changes.get(key), dict) else run[key] for key in run
    } | changes
    with pytest.raises(ConfigError, match=message):
        train(run, dry_run=True)
