"""Columns that carry an answer's grammar to the trainer, which computes the allowed tokens again from it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlhf_core.errors import RlhfError
from rlhf_core.models.kinds import model_kind_of

from .grammar import StructuredAnswer, vocabulary_of
from .structure import MAX_TEXT_BYTES, STRUCTURE, STRUCTURE_TEXT, Structure

if TYPE_CHECKING:
    from rlhf_core.types import Experience

_LENGTH_BYTES = 4
_MAX_JSON_BYTES = 8 * MAX_TEXT_BYTES
"""Maximum size of a structure as JSON, in which a character may take six bytes."""
_WHERE = "log-probs of structured answers"
_tokenizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def structure_columns(structure: Structure, eos_token_ids: Collection[int], num_tokens: int) -> dict[str, Any]:
    """Return the columns of a structured answer.

    Args:
        structure: Its form.
        eos_token_ids: Ids that end an answer.
        num_tokens: Its number of tokens, at least 1.

    Returns:
        Column -> a value per token. The structure's bytes follow their length, in equal parts, the last ones padded.
    """
    packed = zlib.compress(json.dumps([structure.kind, structure.text, *sorted(eos_token_ids)]).encode())
    data = len(packed).to_bytes(_LENGTH_BYTES, "little") + packed
    width = max(_LENGTH_BYTES, -(-len(data) // num_tokens))
    data = data.ljust(width * num_tokens, b"\0")
    parts = [list(data[start : start + width]) for start in range(0, len(data), width)]
    return {STRUCTURE: list(range(1, num_tokens + 1)), STRUCTURE_TEXT: parts}


def allowed_logits(logits: Tensor, allowed: Sequence[bytes | None]) -> Tensor:
    """Replace the logits of tokens that are not allowed by -inf.

    Args:
        logits: [N, V] of any float dtype.
        allowed: For each row, one bit per token id, from the lowest bit of each byte (`StructuredAnswer.allowed`). Ids
            without a bit are not allowed. None allows all.

    Returns:
        [N, V] float32.

    Example:
        >>> allowed_logits(torch.zeros(2, 3), [bytes([0b101]), None])
        tensor([[0., -inf, 0.],
                [0., 0., 0.]])
    """
    size = logits.shape[-1]
    num_bytes = -(-size // 8)
    words = b"".join(
        b"\xff" * num_bytes if bits is None else bits[:num_bytes].ljust(num_bytes, b"\0") for bits in allowed
    )
    packed = torch.frombuffer(bytearray(words), dtype=torch.uint8).view(-1, num_bytes, 1).to(logits.device)
    is_allowed = (packed >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1).bool()
    return logits.float().masked_fill(~is_allowed.flatten(1)[:, :size], -torch.inf)


def structured_actions(model: nn.Module, logits: Tensor, experience: Experience) -> Tensor:
    """Return the logits of a batch's actions without the tokens that their structures do not allow.

    Args:
        model: The innermost model, loaded by its kind, whose tokenizer the answers were sampled with.
        logits: [N, V], at the N True positions of the action mask, in their order.
        experience: The batch, with `STRUCTURE_COLUMNS`.

    Returns:
        [N, V] float32.

    Raises:
        RlhfError: The tokenizer cannot be loaded, or a sampled token is not allowed.
    """
    mask = experience.action_mask.cpu()
    numbers = torch.where(mask, mask.flatten().cumsum(0).view(mask.shape) - 1, -1).tolist()
    allowed: list[bytes | None] = [None] * len(logits)
    for row, places in enumerate(experience.columns[STRUCTURE].cpu().tolist()):
        ids = experience.sequences[row, experience.prompt_length :].tolist()
        text = experience.columns[STRUCTURE_TEXT][row].cpu()
        for start, end in _answers(places):
            structure, ends = _unpack(text[start:end])
            tokenizer = _tokenizer_of(model)
            answer = vocabulary_of(tokenizer, ends).answer(structure, where=_WHERE)
            for place in range(start, end):
                bits = _step(answer, ids[place], int(experience.sample_ids[row]))
                if (number := numbers[row][place]) >= 0:
                    allowed[number] = bits
    return allowed_logits(logits, allowed)


def _step(answer: StructuredAnswer, token_id: int, sample_id: int) -> bytes:
    """Return the allowed tokens, and append the sampled one. Raises `RlhfError` if it is not allowed."""
    bits = answer.allowed()
    if bits is None or token_id // 8 >= len(bits) or not bits[token_id // 8] >> token_id % 8 & 1:
        raise RlhfError(
            f"token {token_id} of sample {sample_id} is not allowed by the grammar it was sampled with",
            where=_WHERE,
            hint="use the same version of llguidance and the same tokenizer in all processes of the run",
        )
    answer.add(token_id)
    return bits


def _answers(places: list[int]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each structured answer of a row, from its tokens' places in their answers."""
    for start in (index for index, place in enumerate(places) if place == 1):
        end = start + 1
        while end < len(places) and places[end] == places[end - 1] + 1:
            end += 1
        yield start, end


def _unpack(text: Tensor) -> tuple[Structure, list[int]]:
    """Return the structure and the ends of an answer from its [n, K] bytes, of which the columns may be padding."""
    size = int.from_bytes(bytes(text[0, :_LENGTH_BYTES].tolist()), "little")
    width = max(_LENGTH_BYTES, -(-(size + _LENGTH_BYTES) // len(text)))
    data = bytes(text[:, :width].flatten().tolist())[_LENGTH_BYTES : _LENGTH_BYTES + size]
    kind, source, *ends = json.loads(zlib.decompressobj().decompress(data, _MAX_JSON_BYTES))
    return Structure(kind, source), ends


def _tokenizer_of(model: nn.Module) -> Any:
    """Return the tokenizer of a model's kind, loaded once."""
    kind = model_kind_of(model)
    if kind not in _tokenizers:
        _tokenizers[kind] = kind.load_tokenizer()
    return _tokenizers[kind]
