"""What a plugin's `build` returned, held against what its kind has to be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..components import Component
from ..errors import PluginError


def check_built(built: object, kind: str, component: Component, *, label: str, name: str) -> None:
    """Raise `PluginError` where the result of the `build` of a component is not of its kind.

    What an environment or a hook has to be is looked at where one is played, or registered.

    label, name: what the plugin is called in the error, and by `rlhf plugins check`.
    """
    wanted = _misses(built, kind, component)
    if wanted is None:
        return
    raise PluginError(
        f"its build returned a {type(built).__name__}, which {wanted}",
        where=label,
        hint=f"the plugin is broken: tell its authors; rlhf plugins check {name}",
    )


def _misses(built: object, kind: str, component: Component) -> str | None:
    """What it lacks, as the end of a sentence."""
    from ..algorithm import DatasetAlgorithm, RolloutAlgorithm
    from ..protocols import Logger, OrderedPromptSource, PromptSource, RolloutEngine
    from ..strategy import Strategy

    if kind == "rewards":
        return None if callable(built) else "cannot be called with rollouts"
    if kind == "optimizers":
        from torch.optim import Optimizer

        return None if isinstance(built, Optimizer) else "is no torch.optim.Optimizer"
    if kind == "schedules":
        return None if callable(built) else "cannot be called with the index of an update"
    if kind == "models":
        return None if callable(getattr(built, "load_tokenizer", None)) else "is no rlhf_core.models.ModelKind"
    if kind == "transports":
        return None if callable(getattr(built, "run", None)) else "has no run(request)"
    if kind == "prompts" and not isinstance(built, PromptSource | OrderedPromptSource):
        if isinstance(built, Iterator):
            return "can be read only once: return a list, or an object that begins anew"
        return None if isinstance(built, Iterable) else "is no PromptSource"  # a stream may be a source of a mixture
    wanted: dict[str, type] = {
        "algorithms": DatasetAlgorithm if component.feeds == "dataset" else RolloutAlgorithm,
        "strategies": Strategy,
        "engines": RolloutEngine,
        "loggers": Logger,
    }
    is_one = kind not in wanted or isinstance(built, wanted[kind])
    return None if is_one else f"is no {wanted[kind].__name__}"
