"""What holds for the loss of any algorithm, and the contract that says so: the base of those of both kinds."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...algorithm import Algorithm, LossOutput
from ...types import Role
from .base import ComponentContract

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

ROLES: frozenset[Role] = frozenset({"policy", "critic", "reference", "teacher"})
TRAINED: frozenset[Role] = frozenset({"policy", "critic"})


def trained_models(algorithm: Algorithm[Any, Any], policy: nn.Module, device: str) -> dict[str, nn.Module]:
    """The models that the trainer passes to `loss`."""
    models = {"policy": policy.to(device)}
    if "critic" in algorithm.roles:
        models["critic"] = algorithm.build_critic(policy).to(device)
    return models


@dataclass
class LossBench(ABC):
    """An algorithm with its models, and the trainer's objective: each term's sum over its count, batch by batch."""

    make: Callable[[], Algorithm[Any, Any]]
    algorithm: Algorithm[Any, Any]
    models: dict[str, nn.Module]
    device: torch.device

    @abstractmethod
    def items(self) -> Sequence[Any]:
        """Five or more, ready for updates."""

    def output(self, items: Sequence[Any]) -> LossOutput:
        batch = self.algorithm.to_device(self.algorithm.collate(items), self.device)
        return self.algorithm.loss(self.models, batch)

    def counts(self, items: Sequence[Any]) -> dict[str, float]:
        return dict(self.algorithm.counts(self.algorithm.collate(items)))

    def total(self, batches: Sequence[Sequence[Any]]) -> Tensor:
        """The loss over all batches together, with gradient."""
        import torch

        counts = [self.counts(batch) for batch in batches]
        outputs = [self.output(batch) for batch in batches]
        total = torch.zeros((), device=self.device)
        for name, term in self.algorithm.terms.items():
            divisor = max(math.fsum(count[name] for count in counts), 1.0)
            total = total + sum(term.coefficient * output.sums[name] / divisor for output in outputs)
        return total

    def gradient(self, batches: Sequence[Sequence[Any]]) -> Tensor:
        """Gradient of all trained models' parameters as one vector; 0 where there is none."""
        import torch

        parameters = [p for model in self.models.values() for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(self.total(batches), parameters, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        return torch.cat([part.flatten() for part in parts])

    def descend(self, items: Sequence[Any], *, steps: int, lr: float) -> list[float]:
        """Train on one batch; the loss before each step, and after the last."""
        import torch

        optimizer = torch.optim.Adam([p for model in self.models.values() for p in model.parameters()], lr=lr)
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


class LossContract(ComponentContract):
    """Subclasses have a fixture `bench`."""

    tolerance: ClassVar[float]

    def test_terms_train_its_roles(self, bench: LossBench) -> None:
        """Each term trains a model among the roles, and each trained model has a term."""
        algorithm = bench.algorithm
        assert algorithm.roles <= ROLES, f"roles are {sorted(ROLES)}, not {sorted(algorithm.roles - ROLES)}"
        assert algorithm.terms, "an algorithm needs at least one loss term"
        for name, term in algorithm.terms.items():
            assert term.role in TRAINED & algorithm.roles, f"term {name} trains {term.role}, which is not in its roles"
        trained = {term.role for term in algorithm.terms.values()}
        assert trained == TRAINED & algorithm.roles, f"no term trains {sorted((TRAINED & algorithm.roles) - trained)}"

    def test_loss_is_sums_and_counts(self, bench: LossBench) -> None:
        """One batch: the named sums and counts, all of them numbers."""
        items, names = bench.items(), set(bench.algorithm.terms)
        output, counts = bench.output(items), bench.counts(items)
        assert set(output.sums) == names, f"loss returns sums of {sorted(output.sums)}, its terms are {sorted(names)}"
        assert set(counts) >= names, f"counts are of {sorted(counts)}, its terms are {sorted(names)}"
        for name, total in output.sums.items():
            assert total.ndim == 0, f"the sum of term {name} has shape {tuple(total.shape)}, not ()"
            assert math.isfinite(float(total.detach())), f"the sum of term {name} is {float(total.detach())}"
            assert math.isfinite(counts[name]) and counts[name] >= 0, f"the count of term {name} is {counts[name]}"
        wrong = [name for name in output.metrics if "/" not in name]
        assert not wrong, f"metrics are called <group>/<name>: {wrong}"

    def test_micro_batches_do_not_change_the_gradient(self, bench: LossBench) -> None:
        items = bench.items()
        whole = bench.gradient([items])
        size = float(whole.abs().max())
        assert size > 0, "the loss has no gradient at all"
        difference = float((bench.gradient([items[:1], items[1:3], items[3:]]) - whole).abs().max())
        assert difference <= self.tolerance * max(size, 1e-6), (
            f"cut into micro-batches the gradient differs by {difference:.3g} (of {size:.3g}): `loss` must return "
            "sums, and `counts` what they are divided by"
        )

    def test_a_masked_item_adds_nothing(self, bench: LossBench) -> None:
        """Neither counts nor sums nor gradient: a rank with less work runs one to stay in step."""
        items = bench.items()
        empty = [bench.algorithm.masked(items[0])]
        counts = bench.counts(empty)
        assert not any(counts[name] for name in bench.algorithm.terms), f"a masked item counts: {counts}"
        sums = {name: float(total.detach()) for name, total in bench.output(empty).sums.items()}
        assert all(abs(value) <= 1e-6 for value in sums.values()), f"a masked item adds to the loss: {sums}"
        whole = bench.gradient([items])
        difference = float((bench.gradient([items, empty]) - whole).abs().max())
        assert difference <= self.tolerance * max(float(whole.abs().max()), 1e-6), "a masked item changes the gradient"

    def test_state_survives_a_checkpoint(self, bench: LossBench) -> None:
        """Its state is JSON, and another instance loads it."""
        bench.items()  # as it was trained on
        bench.algorithm.end_episode()
        state = bench.algorithm.state_dict()
        other = bench.make()
        other.load_state_dict(json.loads(json.dumps(state)))
        assert other.state_dict() == state, f"its state changes on the way through a checkpoint: {state}"
