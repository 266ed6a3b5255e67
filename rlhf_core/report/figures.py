"""Table of a report's plots and their metrics; a new plot is one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One plot: the metrics whose names match `keys` (in this order), without those that match `without`."""

    name: str
    title: str
    caption: str
    keys: tuple[str, ...]
    without: tuple[str, ...] = ()
    unit: str = ""
    stacked: bool = False
    log_scale: bool = False
    from_zero: bool = False
    """Whether the axis starts at zero: for counts, shares and sizes."""
    scale: float = 1.0
    """Values are multiplied by it."""

    def select(self, present: Sequence[str]) -> list[str]:
        """The keys of this plot among a run's metrics."""
        chosen: dict[str, None] = {}
        for pattern in self.keys:
            chosen |= dict.fromkeys(key for key in present if fnmatch(key, pattern))
        return [key for key in chosen if not any(fnmatch(key, pattern) for pattern in self.without)]


FIGURES: tuple[Figure, ...] = (
    Figure(
        name="reward",
        title="Reward",
        caption="Mean over the samples of the episode: reward/mean is the weighted score, the others each reward.",
        keys=("reward/mean", "reward/*"),
        without=(
            "reward/std",
            "reward/*_std",
            "reward/min",
            "reward/max",
            "reward/*fraction*",
            "reward/score_*",
            "reward/normali*",
        ),
    ),
    Figure(
        name="eval",
        title="Held-out evaluation",
        caption="On prompts kept from training.",
        keys=("eval/score", "eval/*"),
        without=("eval/*num_prompts", "eval/*length_mean", "eval/*truncated_fraction"),
    ),
    Figure(
        name="kl",
        title="KL to the reference",
        caption="How far the policy has moved.",
        keys=("kl/mean", "kl/*"),
        without=("kl/coef*", "kl/per_sample"),
        unit="nats",
    ),
    Figure(
        name="approx-kl",
        title="Policy change",
        caption="KL of the policy being trained to the one that sampled.",
        keys=("policy/approx_kl",),
        unit="nats",
    ),
    Figure(name="loss", title="Losses", caption="As optimised, over the global batch.", keys=("loss/*",)),
    Figure(
        name="clip",
        title="Clip fraction",
        caption="Share of tokens whose probability ratio left the trust region.",
        keys=("policy/*clip*fraction*", "policy/clip_fraction", "value/clip_fraction"),
        from_zero=True,
    ),
    Figure(
        name="entropy",
        title="Policy entropy",
        caption="Per token; a fall to zero means that exploration ended.",
        keys=("policy/entropy",),
        unit="nats",
    ),
    Figure(
        name="value",
        title="Value explained variance",
        caption="1: the critic foresees the return; 0: no better than its mean.",
        keys=("value/explained_variance",),
    ),
    Figure(
        name="gradient",
        title="Gradient norm",
        caption="Before clipping.",
        keys=("*grad_norm*",),
        log_scale=True,
    ),
    Figure(name="lr", title="Learning rate", caption="As scheduled.", keys=("*/lr",), from_zero=True),
    Figure(
        name="length",
        title="Response length",
        caption="Tokens per answer, the end token included.",
        keys=("response/length*",),
        unit="tokens",
        from_zero=True,
    ),
    Figure(
        name="truncated",
        title="Truncated answers",
        caption="Share of answers that the token limit cut.",
        keys=("response/truncated_fraction",),
        from_zero=True,
    ),
    Figure(
        name="staleness",
        title="Staleness",
        caption="Policy versions between sampling and training.",
        keys=("staleness/*",),
        unit="versions",
        from_zero=True,
    ),
    Figure(
        name="logprob-gap",
        title="Log-prob gap",
        caption="Trainer against engine on the same tokens; should be rounding error.",
        keys=("rollout/logprob_gap*",),
        unit="nats",
        log_scale=True,
    ),
    Figure(
        name="throughput",
        title="Throughput",
        caption="Tokens sampled and trained on per second of their phase.",
        keys=("tokens_per_second/*",),
        unit="tokens/s",
        from_zero=True,
    ),
    Figure(
        name="time",
        title="Time by phase",
        caption="Seconds of each episode.",
        keys=("time/rollout_s", "time/reward_s", "time/train_s", "time/sync_s", "time/*_s"),
        unit="s",
        stacked=True,
    ),
    Figure(
        name="memory",
        title="Peak memory",
        caption="Of the trainer.",
        keys=("memory/peak_bytes",),
        unit="MiB",
        scale=1 / 2**20,
        from_zero=True,
    ),
)
