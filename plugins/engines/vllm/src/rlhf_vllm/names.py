"""Names under which vLLM gets the weights of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


_WITHOUT_OUTPUT_LAYER = frozenset({"cohere", "cohere2", "gemma2", "gemma3n", "gemma3n_text"})
"""Types of models that vLLM computes with the input embedding alone."""


def has_packed_output(model: Any, device: str) -> bool:
    """Whether vLLM packs an output layer that is tied to the input embedding, and so needs separate weights.

    Args:
        model: transformers model.
        device: Type of the device.
    """
    return device == "cpu" and model.config.model_type not in _WITHOUT_OUTPUT_LAYER


class WeightNames:
    """Renames the weights of a model for vLLM.

    vLLM's CPU build keeps a packed copy of the output layer, which a load of the tied input embedding does not change.
    There the config is without ties, and both layers get the weight.
    """

    def __init__(self, model: Any, *, published: bool, unties: bool) -> None:
        """Read the names of a model.

        Args:
            model: transformers model.
            published: Whether to use the names in published files (see `published_names`).
            unties: Whether vLLM has separate weights for tied ones.
        """
        self._name_of = published_names(model) if published else str
        self._twins: dict[str, list[str]] = {}
        for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items() if unties else ():
            self._twins.setdefault(source, []).append(target)
            self._twins.setdefault(target, []).append(source)

    def renamed(self, shards: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Return shards with vLLM's names.

        Args:
            shards: Weights by their names in the model, tied ones once.
        """
        for shard in shards:
            yield {
                self._name_of(each): value
                for name, value in shard.items()
                for each in (name, *self._twins.get(name, ()))
            }


def published_names(model: Any) -> Callable[[str], str]:
    """Return a function of a weight's name in a model that returns its name in published files.

    Modules of transformers may lack parts of these names, such as `vision_model` in the vision tower of LLaVA. A model
    that was made in code or saved by this project may not contain them in its files either.

    Args:
        model: transformers model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    # From the file to the module. Those of parts of the model come last.
    renamings = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [each.reverse_transform() for each in renamings[::-1] if isinstance(each, WeightRenaming)]

    def published(name: str) -> str:
        for renaming in reverse:
            name, _ = renaming.rename_source_key(name)
        return name

    return published
