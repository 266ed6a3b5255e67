"""Score models: a one-label head on the weights of a causal LM."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from rlhf_core.errors import UserInputError
from rlhf_core.models.kinds import config_of

from .causal_lm import CausalLM, from_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Classifier(CausalLM):
    """A score model: a transformers sequence-classification model with one label.

    It is built from a causal LM's weights unless the folder holds a score model. With an adapter, the head is trained
    in full alongside it.
    """

    model_kind = "sequence-classification"
    peft_task = "SEQ_CLS"

    def load(self, *, dtype: torch.dtype, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
        if tokenizer is None:
            raise ValueError("a score model needs the tokenizer")
        if _is_score_folder(self.model.path):
            model = from_files(self.model, dtype, "AutoModelForSequenceClassification", num_labels=1)
        else:
            model = super().load(dtype=dtype, seed=seed, tokenizer=tokenizer)
        return as_score_model(model, tokenizer)


def _is_score_folder(path: str) -> bool:
    """Whether a model folder declares a sequence-classification model."""
    names = config_of(path).get("architectures") or []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def as_score_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Build a score model on a causal LM's weights. An existing score model is returned as it is.

    A new head starts at zero, so it predicts 0 everywhere, independent of the seed. transformers reads the score at
    the rightmost token that is not padding, so the tokenizer's pad token is set in the config.
    """
    from transformers import AutoModelForSequenceClassification

    if type(model).__name__.endswith("ForSequenceClassification"):
        model.config.pad_token_id = tokenizer.pad_token_id
        return model
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    try:
        # Initialization draws from torch's global generator. The fork restores its state.
        with torch.random.fork_rng(devices=[]):
            scoring = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise UserInputError(
            f"transformers lacks a sequence-classification model of type {config.model_type!r}",
            where="model.path",
            hint="train the reward model from another base model",
        ) from error
    scoring.to(model.dtype)
    scoring.base_model.load_state_dict(model.base_model.state_dict())
    trunk = f"{scoring.base_model_prefix}."
    with torch.no_grad():
        for name, parameter in scoring.named_parameters():
            if not name.startswith(trunk):
                parameter.zero_()
    return scoring  # type: ignore[no-any-return]
