"""The pass of a reference that follows the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf_core.algorithm import PassContext
from rlhf_core.errors import CheckpointError, ConfigError

from .scoring import ReferencePass

if TYPE_CHECKING:
    from torch import nn

WHERE = "algorithm.reference_every"
LAST = "last"
"""Key of the state: the policy version at the last refresh. The other keys are names of parameters."""


class RefreshedReference(ReferencePass):
    """Adds `reference_log_probs` of a reference whose weights are mixed with the policy's every few versions.

    Gorbatovski 2024 ("Learn your reference model for real good alignment"): copy is the hard update, and a smaller
    `mix` the soft one. Checkpoints contain the reference. Each rank stores a part of it.
    """

    def __init__(self, context: PassContext, *, every: int, mix: float) -> None:
        """Create the pass.

        Args:
            context: Models and sampling settings of the run.
            every: Policy versions (episodes) from one refresh to the next.
            mix: Weight of the policy in the refreshed reference. 1 copies the policy.
        """
        super().__init__(context)
        self._every, self._mix = every, mix
        self._last = 0

    def published(self, version: int) -> None:
        """Refresh the reference if it is due. A version that is published again, after a resume, changes nothing.

        Raises:
            ConfigError: The models cannot be mixed. Raised at version 0, before the first update.
        """
        import torch

        reference, policy = self._parameters()
        if version // self._every <= self._last // self._every:
            return
        with torch.no_grad():
            for name, parameter in reference.items():
                if self._mix == 1.0:
                    parameter.copy_(policy[name])
                else:
                    parameter.lerp_(policy[name].to(parameter.device, parameter.dtype), self._mix)
        self._last = version

    def state_dict(self) -> dict[str, Any]:
        """Return the version of the last refresh, and this rank's part of the weights, on the CPU."""
        place, reference = self._context.place, self._parameters()[0]
        mine = list(reference.items())[place.rank :: place.world_size]
        return {LAST: self._last, **{name: each.detach().cpu().clone() for name, each in mine}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the reference. Collective.

        Raises:
            CheckpointError: Fewer ranks than those that saved the parts.
        """
        import torch

        reference = self._parameters()[0]
        part = {name: each.float().numpy(force=True) for name, each in state.items() if name != LAST}
        parts = self._context.place.all_gather_objects(part)
        weights = {name: each for every in parts for name, each in every.items()}
        if missing := reference.keys() - weights.keys():
            raise CheckpointError(
                f"has only {len(weights)} of {len(reference)} tensors of the reference, which more processes saved",
                where=f"the reference, for example {min(missing)}",
                hint="resume with the --num-processes of the run",
            )
        with torch.no_grad():
            for name, parameter in reference.items():
                parameter.copy_(torch.from_numpy(weights[name]))
        self._last = int(state[LAST])

    def _parameters(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Return the parameters of reference and policy by name. Raises `ConfigError` if they cannot be mixed."""
        place, models = self._context.place, self._context.models
        policy = place.unwrap(models["policy"])
        problem = None
        if models["reference"] is models["policy"]:
            problem = "the reference is the policy without its adapter, and has no weights to refresh"
        elif place.shards_parameters:
            problem = "the strategy shards its models, and a sharded reference is not refreshed"
        ours, theirs = dict(models["reference"].named_parameters()), dict(policy.named_parameters())
        if self._mix < 1.0 and any(each.element_size() < 4 for each in ours.values()):
            problem = f"an average with reference_mix: {self._mix} needs float32 weights, not 16 bits"
        if problem is not None:
            raise ConfigError(problem, where=WHERE, hint="remove it, or use another strategy without model.lora")
        if ours.keys() != theirs.keys():
            odd = min(ours.keys() ^ theirs.keys())
            raise ConfigError(f"only one of policy and reference has {odd}", where=WHERE, hint="remove the option")
        return ours, theirs
