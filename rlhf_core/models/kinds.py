"""Kinds of models: what is done differently for one, and which is responsible for a path.

A kind is a plugin (`rlhf.models`) that claims paths. Core's own two claim none: they load what no one else does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..columns import Column
from ..components import Component
from ..config.section import Section
from ..config.sections import LoraConfig, ModelConfig
from ..errors import PluginError, UserInputError
from ..plugins.discovery import discover
from ..plugins.selected import Selected, load, load_ref
from . import pretrained
from .classifier import as_score_model
from .config_check import config_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
KIND = "rlhf_model_kind"
"""Attribute of a model that was loaded by its kind, and of its trunk, of which a critic has a copy."""


class ModelKind:
    """How models of a kind are checked, loaded, fed, adapted and saved; as it is, a causal LM of transformers.

    A plugin's `build` is a subclass, or returns an instance of one. Core keeps an instance with each loaded model, also
    in copies of it, so it should hold options only.
    """

    model_kind = "causal-lm"
    """`Algorithm.model_kind` of the algorithms that it is for."""
    columns: Mapping[str, Column] = {}
    """The columns, each per prompt, that `encode` fills."""

    def __init__(self, options: BaseModel | None = None, model: ModelConfig | None = None) -> None:
        """model: the run's section `model`."""
        self.model = model or ModelConfig(path="builtin:")

    @property
    def inputs_differ(self) -> bool:
        """Whether `inputs` is overridden: forward passes are then made of whole, padded rows."""
        return type(self).inputs is not ModelKind.inputs

    def check(self) -> None:
        """Check the path as far as possible without loading weights. Raises `UserInputError`."""
        pretrained.check_pretrained(self.model)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with a pad token. Raises `UserInputError`."""
        return pretrained.pretrained_tokenizer(self.model)

    def load(self, *, dtype: torch.dtype, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
        """The model on the CPU, without an adapter, the same in every process. Raises `UserInputError`.

        seed: of weights that are not in its files. tokenizer: None for a model that is only run forward.
        """
        return pretrained.load_pretrained(self.model, dtype, seed)

    def encode(self, record: Mapping[str, Any], prompt_ids: Sequence[int]) -> tuple[Sequence[int], Mapping[str, Any]]:
        """The ids of a record's prompt, which the tokenizer made `prompt_ids`, and the values of `columns` by name.

        Raises `DataError` for a record that it cannot use. It is called again after a resume.
        """
        return prompt_ids, {}

    def inputs(self, input_ids: Tensor, attention_mask: Tensor, columns: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """What the forward takes besides these ids and their mask ([B, S] int64 and bool, padded on either side).

        columns: [B, ...] by name, the prompt columns marked `model_input`; none if a model is tried out.
        """
        return {"position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0), **columns}

    def add_adapter(self, model: PreTrainedModel, options: LoraConfig, seed: int) -> PreTrainedModel:
        """The model in a PEFT adapter of `model.lora`, initialised from `seed`; without it, the model is as before."""
        return pretrained.add_lora(model, options, seed)

    def save(self, model: Any, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
        """Write `weights`, the full state of `model` with any adapter merged, to an empty folder for `load`."""
        pretrained.write_transformers_folder(model, weights, folder)
        tokenizer.save_pretrained(folder)


class Classifier(ModelKind):
    """A score model: transformers' sequence classification with one label, on a causal LM's weights if need be."""

    model_kind = "sequence-classification"

    def load(self, *, dtype: torch.dtype, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
        if tokenizer is None:
            raise ValueError("a score model needs the tokenizer")
        return as_score_model(pretrained.load_pretrained(self.model, dtype, seed, scores=True), tokenizer)

    def add_adapter(self, model: PreTrainedModel, options: LoraConfig, seed: int) -> PreTrainedModel:
        """Its head is trained in full, beside the adapter."""
        return pretrained.add_lora(model, options, seed, "SEQ_CLS")


causal_lm = Component("Causal LM of transformers", Section, f"{__name__}:ModelKind")
sequence_classification = Component("Score model of transformers", Section, f"{__name__}:Classifier")


def owner_of(path: str) -> Selected | None:
    """The plugin that claims a model's path; None if core's own kinds load it. Raises `PluginError` if two claim it."""
    found: list[Selected] = []
    config = config_of(path)
    for ref in (each for first in discover("models").values() for each in (first, *first.clashes)):
        try:
            selected = load_ref(ref)
            if selected.component.claims is not None and selected.component.claims(path, config):
                found.append(selected)
        except Exception as error:  # a stranger's code may raise anything
            logger.warning("%s is left out: %s", ref.label, error)
    if len(found) > 1:
        raise PluginError(
            f"{path!r} is claimed by {' and by '.join(each.label for each in found)}",
            where=pretrained.WHERE,
            hint=f"uninstall one of them: pip uninstall {found[-1].distribution}",
        )
    return found[0] if found else None


def kind_for(model: ModelConfig, name: str | None = None) -> ModelKind:
    """The kind that loads a model. name: the algorithm's `model_kind`, which must be the kind's own.

    Raises `PluginError`: two plugins claim the path; `UserInputError`: the algorithm trains another kind.
    """
    selected = owner_of(model.path) or load("models", name or ModelKind.model_kind)
    kind: ModelKind = selected.build(selected.component.config(), model)
    if name not in (None, kind.model_kind):
        raise UserInputError(
            f"{model.path!r} is of the {selected.label}, and the algorithm trains the kind {name!r}",
            where=pretrained.WHERE,
            hint="take another algorithm, or another model",
        )
    return kind


def kind_of(model: nn.Module) -> ModelKind:
    """The kind that loaded the innermost `model`, or its trunk; a causal LM that was made otherwise is plain."""
    found = (vars(part).get(KIND) for part in model.modules())
    return next((kind for kind in found if kind is not None), PLAIN)


PLAIN = ModelKind()
