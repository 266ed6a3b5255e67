"""Guards: hook plugins of core that watch a run and warn, skip, stop it, or roll it back (section `guards`).

They use the public hook `rlhf_verdict`; a hook plugin that implements it is a guard too.
"""

from __future__ import annotations

from ..config.guards import GuardsConfig
from .checks import Guard, NonFinite, OutOfBound, Plateau

__all__ = ["Guard", "GuardsConfig", "NonFinite", "OutOfBound", "Plateau", "make_guards"]


def make_guards(config: GuardsConfig) -> list[Guard]:
    """The enabled guards."""
    guards: list[Guard] = [NonFinite("non_finite", config.non_finite.action, "lower optimizer.lr")]
    kl, entropy, plateau, gap = config.kl, config.entropy, config.plateau, config.log_prob_gap
    if kl.bound is not None:
        hint = "lower optimizer.lr, or raise the algorithm's KL penalty"
        guards.append(OutOfBound("kl", kl.action, "kl/mean", high=kl.bound, hint=hint))
    if entropy.bound is not None:
        hint = "lower optimizer.lr, or sample at a higher engine.temperature"
        guards.append(OutOfBound("entropy", entropy.action, "policy/entropy", low=entropy.bound, hint=hint))
    if plateau.episodes is not None:
        guards.append(
            Plateau("plateau", plateau.action, episodes=plateau.episodes, min_improvement=plateau.min_improvement)
        )
    if gap.bound is not None:
        hint = "compare strategy.precision with what the engine computes in"
        guards.append(OutOfBound("log_prob_gap", gap.action, "rollout/logprob_gap_max", high=gap.bound, hint=hint))
    return guards
