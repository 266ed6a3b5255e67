"""Checks of losses, shared by the contracts of both kinds of algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...algorithm import Algorithm, LossOutput
from ...types import Role

if TYPE_CHECKING:
    from torch import Tensor, nn

ROLES: frozenset[Role] = frozenset({"policy", "critic", "reference", "teacher"})
TRAINED: frozenset[Role] = frozenset({"policy", "critic"})


def trained_models(algorithm: Algorithm[Any, Any], policy: nn.Module, device: str) -> dict[str, nn.Module]:
    """The models that the trainer passes to `loss`."""
    models = {"policy": policy.to(device)}
    if "critic" in algorithm.roles:
        models["critic"] = algorithm.build_critic(policy).to(device)
    return models


def check_terms(algorithm: Algorithm[Any, Any]) -> None:
    """Each term trains a model among the roles, and each trained model has a term."""
    assert algorithm.roles <= ROLES, f"roles are {sorted(ROLES)}, not {sorted(algorithm.roles - ROLES)}"
    assert algorithm.terms, "an algorithm needs at least one loss term"
    for name, term in algorithm.terms.items():
        assert term.role in TRAINED & algorithm.roles, f"term {name} trains {term.role}, which is not in its roles"
    trained = {term.role for term in algorithm.terms.values()}
    assert trained == TRAINED & algorithm.roles, f"no term trains {sorted((TRAINED & algorithm.roles) - trained)}"


class Objective:
    """The trainer's objective, recomputed: each term's sum over its count, batch by batch."""

    def __init__(self, algorithm: Algorithm[Any, Any], models: Mapping[str, nn.Module], device: str) -> None:
        import torch

        self._algorithm = algorithm
        self._models = models
        self._device = torch.device(device)

    def output(self, items: Sequence[Any]) -> LossOutput:
        batch = self._algorithm.to_device(self._algorithm.collate(items), self._device)
        return self._algorithm.loss(self._models, batch)

    def counts(self, items: Sequence[Any]) -> dict[str, float]:
        return dict(self._algorithm.counts(self._algorithm.collate(items)))

    def total(self, batches: Sequence[Sequence[Any]]) -> Tensor:
        """The loss over all batches together, with gradient."""
        import torch

        counts = [self.counts(batch) for batch in batches]
        outputs = [self.output(batch) for batch in batches]
        total = torch.zeros((), device=self._device)
        for name, term in self._algorithm.terms.items():
            divisor = max(math.fsum(count[name] for count in counts), 1.0)
            total = total + sum(term.coefficient * output.sums[name] / divisor for output in outputs)
        return total

    def gradient(self, batches: Sequence[Sequence[Any]]) -> Tensor:
        """Gradient of all trained models' parameters as one vector; 0 where there is none."""
        import torch

        parameters = [p for model in self._models.values() for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(self.total(batches), parameters, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        return torch.cat([part.flatten() for part in parts])

    def descend(self, items: Sequence[Any], *, steps: int, lr: float) -> list[float]:
        """Train on one batch; the loss before each step, and after the last."""
        import torch

        parameters = [p for model in self._models.values() for p in model.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=lr)
        seen = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.total([items])
            torch.autograd.backward(loss)
            optimizer.step()
            seen.append(float(loss.detach()))
        with torch.no_grad():
            seen.append(float(self.total([items])))
        return seen


def check_output(algorithm: Algorithm[Any, Any], objective: Objective, items: Sequence[Any]) -> None:
    """One batch: the named sums and counts, all of them numbers."""
    output, counts = objective.output(items), objective.counts(items)
    names = set(algorithm.terms)
    assert set(output.sums) == names, f"loss returns sums of {sorted(output.sums)}, its terms are {sorted(names)}"
    assert set(counts) >= names, f"counts are of {sorted(counts)}, its terms are {sorted(names)}"
    for name, total in output.sums.items():
        assert total.ndim == 0, f"the sum of term {name} has shape {tuple(total.shape)}, not ()"
        assert math.isfinite(float(total.detach())), f"the sum of term {name} is {float(total.detach())}"
        assert math.isfinite(counts[name]) and counts[name] >= 0, f"the count of term {name} is {counts[name]}"
    wrong = [name for name in output.metrics if "/" not in name]
    assert not wrong, f"metrics are called <group>/<name>: {wrong}"


def check_split(objective: Objective, items: Sequence[Any], *, tolerance: float) -> None:
    """The gradient is the same however the update is split; a masked item adds nothing."""
    whole = objective.gradient([items])
    size = float(whole.abs().max())
    assert size > 0, "the loss has no gradient at all"
    cut = [items[:1], items[1:3], items[3:]]
    difference = float((objective.gradient(cut) - whole).abs().max())
    assert difference <= tolerance * max(size, 1e-6), (
        f"cut into micro-batches the gradient differs by {difference:.3g} (of {size:.3g}): `loss` must return sums, "
        "and `counts` what they are divided by"
    )


def check_masked(algorithm: Algorithm[Any, Any], objective: Objective, items: Sequence[Any], tolerance: float) -> None:
    """A masked item has neither counts nor sums nor gradient."""
    empty = [algorithm.masked(items[0])]
    counts = objective.counts(empty)
    assert not any(counts[name] for name in algorithm.terms), f"a masked item counts: {counts}"
    sums = {name: float(total.detach()) for name, total in objective.output(empty).sums.items()}
    assert all(abs(value) <= 1e-6 for value in sums.values()), f"a masked item adds to the loss: {sums}"
    whole = objective.gradient([items])
    difference = float((objective.gradient([items, empty]) - whole).abs().max())
    assert difference <= tolerance * max(float(whole.abs().max()), 1e-6), "a masked item changes the gradient"


def check_state(make: Any, algorithm: Algorithm[Any, Any]) -> None:
    """Its checkpoint state is JSON, and another instance loads it."""
    import json

    state = algorithm.state_dict()
    again = json.loads(json.dumps(state))
    other = make()
    other.load_state_dict(again)
    assert other.state_dict() == state, f"its state changes on the way through a checkpoint: {state}"
