"""Base of the contracts of both kinds of algorithms: requirements on their losses."""

from __future__ import annotations

import json
import math
from itertools import chain
from typing import ClassVar

from rlhf_core.types import Role

from ..benches import LossBench
from .base import ComponentContract

ROLES: frozenset[Role] = frozenset({"policy", "critic", "reference"})
TRAINED: frozenset[Role] = frozenset({"policy", "critic"})


class LossContract(ComponentContract):
    """Tests of a loss. Subclasses define the fixture `bench`."""

    tolerance: ClassVar[float]

    def test_terms_train_its_roles(self, bench: LossBench) -> None:
        """Each term trains a model among the roles, and each trained model has a term."""
        algorithm = bench.algorithm
        known = ROLES | set(getattr(algorithm, "frozen_models", ()))
        assert algorithm.roles <= known, f"unknown roles {sorted(algorithm.roles - known)}, known: {sorted(known)}"
        assert algorithm.terms, "terms must contain at least one loss term"
        for name, term in algorithm.terms.items():
            assert term.role in TRAINED & algorithm.roles, f"term {name} trains {term.role}, which is not in roles"
        trained = {term.role for term in algorithm.terms.values()}
        assert trained == TRAINED & algorithm.roles, f"no term for {sorted((TRAINED & algorithm.roles) - trained)}"

    def test_loss_is_sums_and_counts(self, bench: LossBench) -> None:
        """The loss of a batch returns the declared sums and counts, all finite."""
        items, names = bench.items(), set(bench.algorithm.terms)
        output, counts = bench.output(items), bench.counts(items)
        assert set(output.sums) == names, f"loss() must return sums of {sorted(names)}, got {sorted(output.sums)}"
        assert set(counts) >= names, f"counts() must return counts of {sorted(names)}, got {sorted(counts)}"
        for name, total in output.sums.items():
            assert total.ndim == 0, f"the sum of term {name} must have shape (), got {tuple(total.shape)}"
            assert math.isfinite(float(total.detach())), f"the sum of term {name} is {float(total.detach())}"
            assert math.isfinite(counts[name]) and counts[name] >= 0, f"the count of term {name} is {counts[name]}"
        wrong = [name for name in output.metrics if "/" not in name]
        assert not wrong, f"metric names must be <group>/<name>, got {wrong}"

    def test_micro_batches_do_not_change_the_gradient(self, bench: LossBench) -> None:
        """Micro-batches contain whole units."""
        items = bench.items()
        units = bench.algorithm.units(items)
        parts = [list(chain.from_iterable(part)) for part in (units[:1], units[1:3], units[3:]) if part]
        whole = bench.gradient([items])
        size = float(whole.abs().max())
        assert size > 0, "the gradient of the loss is 0"
        difference = float((bench.gradient(parts) - whole).abs().max())
        assert difference <= self.tolerance * max(size, 1e-6), (
            f"split into micro-batches, the gradient differs by {difference:.3g} (of {size:.3g}): `loss` must return "
            "sums, and `counts` their divisors"
        )

    def test_a_masked_item_adds_nothing(self, bench: LossBench) -> None:
        """A masked item adds neither counts nor sums nor gradient. A rank with less work runs one to stay in step."""
        items = bench.items()
        empty = [bench.algorithm.masked(items[0])]
        counts = bench.counts(empty)
        assert not any(counts[name] for name in bench.algorithm.terms), f"a masked item must count 0, got {counts}"
        sums = {name: float(total.detach()) for name, total in bench.output(empty).sums.items()}
        assert all(abs(value) <= 1e-6 for value in sums.values()), f"sums of a masked item must be 0, got {sums}"
        whole = bench.gradient([items])
        difference = float((bench.gradient([items, empty]) - whole).abs().max())
        assert difference <= self.tolerance * max(float(whole.abs().max()), 1e-6), "a masked item changes the gradient"

    def test_state_survives_a_checkpoint(self, bench: LossBench) -> None:
        """The state is JSON, and another instance loads it."""
        bench.items()  # computes advantages, which may change the state
        bench.algorithm.end_episode()
        state = bench.algorithm.state_dict()
        other = bench.make()
        other.load_state_dict(json.loads(json.dumps(state)))
        assert other.state_dict() == state, f"the state changes in a checkpoint: {state} -> {other.state_dict()}"
