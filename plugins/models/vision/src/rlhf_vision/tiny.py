"""`builtin:tiny-vision`: a LLaVA of 0.2 million parameters with its tokenizer, made in code, for a CPU."""

from __future__ import annotations

import string
from typing import Any

import torch

_SIZE, _PATCH, _WIDTH = 32, 8, 64
_SPECIAL = ("<pad>", "<s>", "</s>", "<image>")
_CHARACTERS = string.digits + string.ascii_letters + " ?.!,:+-*=()'\n"
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
)


def tiny_tokenizer() -> Any:
    """Return a tokenizer with one token per character."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: place for place, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    characters = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = Fuse()
    pad, begin, end, image = _SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=pad,
        bos_token=begin,
        eos_token=end,
        additional_special_tokens=[image],
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def tiny_config() -> Any:
    """Return the config of the model."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    sizes: dict[str, Any] = {
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    pad, begin, end, image = range(len(_SPECIAL))
    tokens: dict[str, Any] = {"pad_token_id": pad, "bos_token_id": begin, "eos_token_id": end}
    vision = CLIPVisionConfig(**sizes, image_size=_SIZE, patch_size=_PATCH, projection_dim=_WIDTH)
    text = LlamaConfig(**sizes, **tokens, vocab_size=len(_SPECIAL) + len(_CHARACTERS), max_position_embeddings=256)
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image,
        image_seq_length=(_SIZE // _PATCH) ** 2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **tokens,
    )


def tiny_model(seed: int) -> Any:
    """Return the model in float32, with weights that depend on `seed` only."""
    from transformers import LlavaForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlavaForConditionalGeneration(tiny_config())


def tiny_processor() -> Any:
    """Return the image processor: pictures of 32 x 32 pixels with values from -1 to 1."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return CLIPImageProcessorPil(
        size={"shortest_edge": _SIZE},
        crop_size={"height": _SIZE, "width": _SIZE},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
