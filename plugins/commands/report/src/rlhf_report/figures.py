"""Table of a report's plots and their metrics; a new plot is one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

_SET_SCORE = re.compile(r"eval/([A-Za-z0-9][\w.-]*)/score")
_MAX_SETS = 16


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot: the metrics whose names match `keys` (in this order), without those that match `without`."""

    name: str
    title: str
    caption: str
    keys: tuple[str, ...]
    without: tuple[str, ...] = ()
    unit: str = ""
    log_scale: bool = False
    from_zero: bool = False
    """Whether the axis starts at zero: for counts, shares and sizes."""
    even_if_zero: bool = False
    """Whether it is drawn where every value is zero, too: that a reward is never given has to be seen."""
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
        "reward",
        "Reward",
        "Mean over the samples of the episode: the weighted score, and each reward that is not all of it.",
        ("reward/mean", "reward/*"),
        without=(
            "reward/std",
            "reward/*_std",
            "reward/min",
            "reward/max",
            "reward/*fraction*",
            "reward/score_*",
            "reward/normali*",
        ),
        even_if_zero=True,
    ),
    Figure(
        "eval",
        "Held-out evaluation",
        "On prompts kept from training; step 0 is before it; shaded: 95% interval over the prompts.",
        ("eval/score", "eval/*"),
        without=(
            *("*num_prompts", "*num_scored", "*length_mean", "*truncated_fraction", "*_low", "*_high", "*@*"),
            *("eval/environment/*", "eval/response/*", "eval/sampled/environment/*", "eval/sampled/response/*"),
        ),
        even_if_zero=True,
    ),
    Figure(
        "eval-samples",
        "Several answers to each held-out prompt",
        "avg: mean score; pass: one of them is right; maj: score of the most frequent one.",
        ("eval/avg@*", "eval/maj@*", "eval/pass@*"),
        without=("*_low", "*_high"),
    ),
    Figure(
        "kl",
        "KL to the reference",
        "How far the policy has moved.",
        ("kl/mean", "kl/*"),
        without=("kl/coef*", "kl/per_sample"),
        unit="nats",
    ),
    Figure(
        "approx-kl",
        "Policy change",
        "KL of the policy being trained to the one that sampled.",
        ("policy/approx_kl",),
        unit="nats",
    ),
    Figure("loss", "Losses", "As optimised, over the global batch.", ("loss/*",)),
    Figure(
        "clip",
        "Clip fraction",
        "Share of tokens whose probability ratio left the trust region.",
        ("policy/*clip*fraction*", "policy/clip_fraction", "value/clip_fraction"),
        from_zero=True,
    ),
    Figure(
        "entropy",
        "Policy entropy",
        "Per token; a fall to zero means that exploration ended.",
        ("policy/entropy",),
        unit="nats",
    ),
    Figure(
        "value",
        "Value explained variance",
        "1: the critic foresees the return; 0: no better than its mean.",
        ("value/explained_variance",),
    ),
    Figure("gradient", "Gradient norm", "Before clipping.", ("*grad_norm*",), log_scale=True),
    Figure("lr", "Learning rate", "As scheduled.", ("*/lr",), from_zero=True),
    Figure(
        "length",
        "Response length",
        "Tokens per answer, the end token included.",
        ("response/length*",),
        unit="tokens",
        from_zero=True,
    ),
    Figure(
        "truncated",
        "Truncated answers",
        "Share of answers that the token limit cut.",
        ("response/truncated_fraction",),
        from_zero=True,
    ),
    Figure(
        "staleness",
        "Staleness",
        "Policy versions between sampling and training.",
        ("staleness/*",),
        unit="versions",
        from_zero=True,
    ),
    Figure(
        "logprob-gap",
        "Log-prob gap",
        "Trainer against engine on the same tokens; should be rounding error.",
        ("rollout/logprob_gap*",),
        unit="nats",
        log_scale=True,
    ),
    Figure(
        "throughput",
        "Throughput",
        "Tokens sampled and trained on per second of their phase.",
        ("tokens_per_second/*",),
        unit="tokens/s",
        from_zero=True,
    ),
    Figure(
        "time",
        "Time by phase",
        "Seconds of each episode.",
        ("time/rollout_s", "time/reward_s", "time/train_s", "time/sync_s", "time/*_s"),
        unit="s",
        from_zero=True,
    ),
    Figure(
        "reward-calls",
        "Time in reward calls",
        "Seconds, evaluations left out; concurrent calls add up.",
        ("reward_calls/*/seconds",),
        unit="s",
        from_zero=True,
    ),
    Figure(
        "memory", "Peak memory", "Of the trainer.", ("memory/peak_bytes",), unit="MiB", scale=1 / 2**20, from_zero=True
    ),
)


def figures_for(keys: Sequence[str]) -> list[Figure]:
    """The plots of runs with these metrics: `FIGURES`, and one for each named evaluation set."""
    found = dict.fromkeys(match[1] for key in keys if (match := _SET_SCORE.fullmatch(key)) and match[1] != "sampled")
    sets = list(found)[:_MAX_SETS]
    figures: list[Figure] = []
    for figure in FIGURES:
        own = replace(figure, without=(*figure.without, *(f"eval/{name}/*" for name in sets)))
        figures.append(own if figure.name == "eval" else figure)
        if figure.name == "eval-samples":
            figures += [_set_figure(name) for name in sets]
    return figures


def _set_figure(name: str) -> Figure:
    kinds = ("score", "avg@*", "maj@*", "pass@*")
    return Figure(
        name=f"eval-{name}",
        title=f"Held-out set {name}",
        caption="Greedy score and, of several answers, avg, pass and maj; shaded: 95% interval over the prompts.",
        keys=tuple(f"eval/{name}/{kind}" for kind in kinds),
        without=("*_low", "*_high"),
    )
