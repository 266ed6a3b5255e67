"""Frozen models of a run besides its start policy: a teacher, say, which an algorithm declares as a role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..algorithm import FrozenModel
from ..config.sections import ModelConfig
from ..errors import UserInputError
from ..types import Role
from .loading import check_model, load_policy, load_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from ..place import Place


def check_frozen(models: Mapping[Role, FrozenModel], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserInputError` if one of them cannot be, or its tokens are not those of the policy's `tokenizer`.

    What is compared is which text each id of the policy stands for: the model is given ids and encodes nothing.
    """
    for role, frozen in models.items():
        _check(role, frozen, tokenizer)


def _check(role: Role, frozen: FrozenModel, tokenizer: PreTrainedTokenizerBase) -> None:
    config, where = ModelConfig(path=frozen.path), f"algorithm.{role}.path"
    try:
        check_model(config)
        its = load_tokenizer(config).get_vocab()
    except UserInputError as error:
        raise UserInputError(error.message, where=where, hint=error.hint) from error
    ours = tokenizer.get_vocab()
    different = [token for token in sorted(ours, key=ours.__getitem__) if its.get(token) != ours[token]]
    if different:
        token = different[0]
        raise UserInputError(
            f"{frozen.path!r} has another tokenizer than the policy: {len(different)} of the policy's {len(ours)} "
            f"tokens differ, the first is {token!r}: {ours[token]} here, {its.get(token, 'absent')} there",
            where=where,
            hint=f"take a {role} of the policy's own family, whose tokens are the same",
        )


def place_frozen(role: Role, frozen: FrozenModel, place: Place, *, dtype: torch.dtype, seed: int) -> nn.Module:
    """The model, frozen and placed. dtype: the one that `auto` stands for."""
    import torch

    chosen = dtype if frozen.dtype == "auto" else getattr(torch, frozen.dtype)
    try:
        with place.model_init_context():
            model = load_policy(ModelConfig(path=frozen.path), dtype=chosen, seed=seed)
    except UserInputError as error:
        raise UserInputError(error.message, where=f"algorithm.{role}.path", hint=error.hint) from error
    return place.prepare_inference(model)
