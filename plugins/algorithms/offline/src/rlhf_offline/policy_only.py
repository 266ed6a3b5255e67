"""Base of the offline algorithms: one loss trains the policy alone, on items of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.algorithm import DatasetAlgorithm, LossTerm
from rlhf_core.components import AlgorithmContext
from rlhf_core.errors import UserInputError
from rlhf_core.types import Role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .answers import Answers
    from .examples import Example

ItemT = TypeVar("ItemT", "Example", "Answers")
BatchT = TypeVar("BatchT", bound=Sized)


class PolicyOnly(DatasetAlgorithm[ItemT, BatchT]):
    """An algorithm with the single loss term `policy`.

    If it trains a score, the tokenizer gets a pad token other than EOS.
    """

    config: Any
    """Options, of a class that each algorithm declares."""

    def __init__(self, config: Any, context: AlgorithmContext) -> None:
        self.config = config
        self.kind = context.kind
        scores = self.model_kind == "sequence-classification"
        self._pad_id = set_pad_token(context.tokenizer) if scores else 0

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({"policy"})

    @property
    def terms(self) -> Mapping[str, LossTerm]:
        return {"policy": LossTerm("policy")}

    def masked(self, item: ItemT) -> ItemT:
        return item.masked()


def set_pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Set a pad token other than EOS if the tokenizer lacks one, and return its id.

    transformers reads the score at the rightmost token that is not padding. Every text ends in EOS, so with a separate
    pad token that is the last real token, here and for any loader of the saved folder.
    """
    if tokenizer.eos_token_id is None:
        raise UserInputError(
            "the tokenizer lacks an end-of-sequence token, at which the score is read",
            where="model.path",
            hint="set eos_token in the model's tokenizer_config.json",
        )
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.pad_token = _other_token(tokenizer)
    return int(tokenizer.pad_token_id)


def _other_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """A pad token that texts do not end with: a special token, or any token but EOS."""
    for token in (tokenizer.unk_token, tokenizer.bos_token):
        if token is not None and token != tokenizer.eos_token:
            return str(token)
    return str(tokenizer.convert_ids_to_tokens(0 if tokenizer.eos_token_id != 0 else 1))
