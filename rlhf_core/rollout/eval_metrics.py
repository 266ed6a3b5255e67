"""Metrics `eval/…` of scored answers to held-out prompts: means, avg@k, pass@k, maj@k and their intervals."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..config.sections import EvalSetOptions
from .episode_metrics import environment_metrics

_RESAMPLES = 1000
_INTERVAL = (0.025, 0.975)
_FINAL_ANSWER = re.compile(r"\\boxed\{([^{}]*)\}|<answer>(.*?)</answer>|####[ \t]*([^\n]+)", re.DOTALL)


class EvaluationRow(NamedTuple):
    """One answer, or one episode, of an evaluation."""

    rewards: dict[str, float]
    """Raw scores by reward name. Empty if a reward's failure policy dropped the sample."""
    num_tokens: int
    """Sampled tokens of all branches."""
    truncated: bool
    """Whether the answer was cut by the token limit."""
    sampled: bool = False
    """Whether this is one of the `samples_per_prompt` answers, not the greedy one."""
    prompt: int = 0
    """Index of the prompt in the evaluation."""
    answer: str = ""
    """The answer's vote in maj@k (see `final_answer`)."""
    set_index: int = 0
    """Index of the evaluation set."""
    environment: Mapping[str, float] = {}
    """The environment's metrics of the episode."""


def evaluation_metrics(
    rows: Sequence[EvaluationRow], sets: Sequence[tuple[str | None, EvalSetOptions]]
) -> dict[str, float]:
    """Compute the metrics of all evaluation sets. A dropped sample counts as 0, so failing rewards never help a policy.

    Args:
        rows: Answers of all sets, in any order.
        sets: Name and options of each set, by `set_index`. The set of the section `eval` itself has the name None.

    Returns:
        `eval/<name>/…` of each set, or `eval/…` for the set without a name, and `eval/score`: the greedy score of the
        first set.

    Example:
        >>> rows = [EvaluationRow({"exact": score}, num_tokens=5, truncated=False, prompt=i)
        ...         for i, score in enumerate([1.0, 0.0, 1.0, 1.0])]
        >>> evaluation_metrics(rows, [(None, EvalSetOptions())])["eval/score"]
        0.75
    """
    metrics: dict[str, float] = {}
    prefixes = ["eval" if name is None else f"eval/{name}" for name, _ in sets]
    for index, (prefix, (_, options)) in enumerate(zip(prefixes, sets, strict=True)):
        own = sorted((row for row in rows if row.set_index == index), key=lambda row: row.prompt)
        greedy, sampled = [row for row in own if not row.sampled], [row for row in own if row.sampled]
        metrics |= _means(greedy, options.score, prefix)
        metrics |= _means(sampled, options.score, f"{prefix}/sampled")
        by_prompt = per_prompt_values(greedy, sampled, options)
        if options.samples_per_prompt:
            metrics |= {f"{prefix}/{name}": math.fsum(v) / len(v) for name, v in by_prompt.items()}
        for name, (low, high) in bootstrap_intervals(by_prompt).items():
            metrics |= {f"{prefix}/{name}_low": low, f"{prefix}/{name}_high": high}
    if sets and (first := metrics.get(f"{prefixes[0]}/score")) is not None:
        metrics["eval/score"] = first
    return metrics


def per_prompt_values(
    greedy: Sequence[EvaluationRow], sampled: Sequence[EvaluationRow], options: EvalSetOptions
) -> dict[str, list[float]]:
    """Return metric -> its values per prompt, in order. The reported metric is their mean.

    Metrics are `score` of the greedy answers and, for k sampled ones, `avg@k`, `maj@k`, and `pass@n` for
    n = 1, 2, 4, … and k.
    """
    name = options.score or next((next(iter(row.rewards)) for row in (*greedy, *sampled) if row.rewards), None)
    if name is None:
        return {}
    values = {"score": [row.rewards.get(name, 0.0) for row in greedy]}
    k = options.samples_per_prompt
    if k:
        answers: dict[int, list[EvaluationRow]] = defaultdict(list)
        for row in sampled:
            answers[row.prompt].append(row)
        scores = {prompt: [row.rewards.get(name, 0.0) for row in rows] for prompt, rows in answers.items()}
        values[f"avg@{k}"] = [math.fsum(each) / len(each) for each in scores.values()]
        passed = [sum(score >= options.passing_score for score in each) for each in scores.values()]
        for n in sorted({*(2**i for i in range(k.bit_length())), k}):
            values[f"pass@{n}"] = [pass_at(k, count, n) for count in passed]
        values[f"maj@{k}"] = [majority_score(rows, name) for rows in answers.values()]
    return {metric: each for metric, each in values.items() if each}


def pass_at(n: int, correct: int, k: int) -> float:
    """Return the probability that at least one of k answers is correct: 1 - C(n - correct, k) / C(n, k).

    Unbiased estimate from n sampled answers, `correct` of which are right (Chen et al. 2021, arXiv:2107.03374,
    section 2.1).

    Example:
        >>> pass_at(4, correct=1, k=2)  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        0.5
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_score(rows: Sequence[EvaluationRow], name: str) -> float:
    """Return the mean score of the samples with the most frequent answer, averaged over answers that tie."""
    votes: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.rewards:
            votes[row.answer].append(row.rewards[name])
    most = max((len(scores) for scores in votes.values()), default=0)
    winners = [math.fsum(scores) / most for scores in votes.values() if len(scores) == most]
    return math.fsum(winners) / len(winners) if winners else 0.0


def final_answer(text: str) -> str:
    r"""Return the final answer in a text: its last `\boxed{…}`, `<answer>…</answer>` or `#### …`, else the whole text.

    Example:
        >>> final_answer("1 + 1 is two, so the answer is <answer> 2 </answer>.")
        '2'
    """
    marked = _FINAL_ANSWER.findall(text)
    return " ".join(("".join(marked[-1]) if marked else text).split())


def bootstrap_intervals(values: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Return the 95% interval of each metric's mean from a percentile bootstrap over prompts, with a fixed seed."""
    import torch

    intervals: dict[str, tuple[float, float]] = {}
    for name, each in values.items():
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(each), (_RESAMPLES, len(each)), generator=generator)
        means = torch.tensor(each, dtype=torch.float64)[drawn].mean(dim=1)
        low, high = torch.quantile(means, torch.tensor(_INTERVAL, dtype=torch.float64)).tolist()
        intervals[name] = (low, high)
    return intervals


def _means(rows: Sequence[EvaluationRow], score: str | None, prefix: str) -> dict[str, float]:
    scored = [row for row in rows if row.rewards]
    if not scored:
        return {}
    names = list(scored[0].rewards)
    metrics = {f"{prefix}/{name}": math.fsum(row.rewards[name] for row in scored) / len(rows) for name in names}
    metrics[f"{prefix}/score"] = metrics[f"{prefix}/{score or names[0]}"]
    metrics[f"{prefix}/length_mean"] = sum(row.num_tokens for row in scored) / len(scored)
    metrics[f"{prefix}/truncated_fraction"] = sum(row.truncated for row in scored) / len(scored)
    metrics[f"{prefix}/num_prompts"] = float(len({row.prompt for row in rows}))
    metrics[f"{prefix}/num_scored"] = float(len(scored))
    return metrics | {
        f"{prefix}/{name}": value for name, value in environment_metrics([row.environment for row in scored]).items()
    }
