"""Losses against formulas in float64, written here from the API's documentation."""

import numpy as np
import pytest
import torch

from rlhf_serve_training.losses import inputs_of, loss_of
from rlhf_serve_training.wire import InvalidRequest, Row

LOW, HIGH = 0.7, 1.4


def oracle(name, log_probs, fields, mask, beta=0.05):
    """Sum over positions, row by row, with autograd in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(mask)):
        own = mask[row]
        new = log_probs[row][own]
        each = {key: value[row][own].double() for key, value in fields.items()}
        if name == "cross_entropy":
            total = total - (new * each["weights"]).sum()
            continue
        old, advantages = each["logprobs"], each["advantages"]
        ratio = (new - old).exp()
        if name == "importance_sampling":
            total = total - (ratio * advantages).sum()
        elif name == "ppo":
            total = total - torch.minimum(ratio * advantages, ratio.clamp(LOW, HIGH) * advantages).sum()
        elif name == "cispo":
            total = total - (ratio.clamp(LOW, HIGH).detach() * new * advantages).sum()
        elif name == "dro":
            total = total - (new * advantages - 0.5 * beta * (new - old) ** 2).sum()
        elif name == "gspo":
            in_ratio = each["sequence_ratio_mask"] != 0
            mean = (new.detach() - old)[in_ratio].mean()
            ratio = (mean + new - new.detach()).exp()
            total = total - torch.minimum(ratio * advantages, ratio.clamp(LOW, HIGH) * advantages).sum()
    return total


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro"])
def test_equals_the_formula(name):
    generator = torch.Generator().manual_seed(0)

    def random(scale=1.0):
        return torch.randn(3, 9, generator=generator) * scale

    mask = torch.tensor([[True] * 9, [True] * 6 + [False] * 3, [True] * 2 + [False] * 7])
    log_probs = (random() - 2).clamp(max=-0.01)
    in_ratio = torch.rand(3, 9, generator=generator) > 0.4
    in_ratio[:, 0] = True
    fields = {
        "weights": random(),
        "logprobs": log_probs + random(0.4),
        "advantages": random(),
        "sequence_ratio_mask": in_ratio.float(),
    }
    if name == "gspo":
        fields["advantages"] = fields["advantages"] * in_ratio
    fields = {key: torch.where(mask, value, 0.0) for key, value in fields.items() if key in inputs_of(name)}
    config = {"beta": 0.05} if name == "dro" else {}
    if name in ("ppo", "cispo", "gspo"):
        config = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}
    ids = np.zeros(9, np.int64)
    rows = [Row(ids, {"target_tokens": ids} | {key: v[i].numpy() for key, v in fields.items()}) for i in range(3)]
    ours = log_probs.clone().requires_grad_(True)
    losses = loss_of(name, config, rows)(ours, fields, mask)
    assert (losses[~mask] == 0).all()
    losses.sum().backward()
    exact = log_probs.double().requires_grad_(True)
    expected = oracle(name, exact, fields, mask)
    expected.backward()
    assert losses.detach().double().sum().item() == pytest.approx(expected.item(), abs=1e-5)
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


def row(**fields):
    return Row(
        np.arange(3), {"target_tokens": np.arange(3)} | {k: np.asarray(v, np.float32) for k, v in fields.items()}
    )


@pytest.mark.parametrize(
    ("name", "config", "rows", "message"),
    [
        ("stable_reinforce", {}, [row()], "its formula is not published. Offered: cross_entropy"),
        ("custom", {}, [row()], "forward_backward_custom"),
        ("grpo", {}, [row()], "the loss 'grpo' is unknown"),
        ("cross_entropy", {}, [row()], "datum 0: cross_entropy needs weights"),
        ("cross_entropy", {}, [row(weights=[1, 1, 1], advantages=[1, 1, 1])], "does not read advantages"),
        ("cross_entropy", {"beta": 1.0}, [row(weights=[1, 1, 1])], "does not have the option 'beta'"),
        ("dro", {"beta": "x"}, [row(logprobs=[0] * 3, advantages=[0] * 3)], "is a number, not the text"),
        ("ppo", {"clip_low_threshold": 1.2}, [row(logprobs=[0] * 3, advantages=[0] * 3)], "1 must be between"),
        (
            "gspo",
            {},
            [row(logprobs=[0] * 3, advantages=[1] * 3, sequence_ratio_mask=[1, 1, 0])],
            "advantages must be 0 where",
        ),
    ],
)
def test_refuses_by_name(name, config, rows, message):
    with pytest.raises(InvalidRequest, match=message):
        loss_of(name, config, rows)
