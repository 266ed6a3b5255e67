"""Writes a model folder as one GGUF file, the format of llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import PluginError, UserInputError, first_line
from rlhf_models import read_weights, stored_dtype

from .gguf_tokenizer import WHERE, add_tokenizer

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter
    from torch import Tensor

    from .model import Dtype

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`model_type` in transformers, which is also the name of the architecture in GGUF."""
_SKIPPED = ("rotary_emb.inv_freq",)
"""Endings of tensors that are computed from the config."""
_EMBEDDINGS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_HINT = "export a model folder with --to DIR, and convert it with llama.cpp's convert_hf_to_gguf.py"


def check_target(target: Path, new_folder: Path | None = None) -> None:
    """Raise an error if the file cannot be written.

    Args:
        target: the new file.
        new_folder: a folder that will exist by then.

    Raises:
        PluginError: the package gguf is not installed.
        UserInputError: `target` exists, or its folder does not.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise PluginError("needs the package gguf", where=WHERE, hint="pip install 'rlhf-export[gguf]'") from error
    if target.exists():
        raise UserInputError("already exists", where=str(target), hint="choose another file: --gguf FILE")
    if not target.parent.is_dir() and target.parent != new_folder:
        raise UserInputError("its folder does not exist", where=str(target), hint=f"mkdir -p {target.parent}")


def write_gguf(folder: Path, target: Path, dtype: Dtype | None = None) -> None:
    """Write a model folder as a GGUF file.

    Tensors with one dimension are stored in float32, all others in `dtype`.

    Args:
        folder: folder of a causal LM of a supported architecture, with a fast tokenizer.
        target: the new file.
        dtype: type of the matrices. None keeps the type of the folder.

    Raises:
        UserInputError: the architecture, one of its options or the tokenizer is not supported, a weight does not fit
            into float16, or the file cannot be written.
    """
    from transformers import AutoConfig, AutoTokenizer

    from .gguf_writer import Writer

    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserInputError(f"cannot be read: {first_line(error)}", where=str(folder)) from error
    check_supported(config)
    chosen: Any = dtype or str(stored_dtype(folder)).removeprefix("torch.")
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)
    writer = Writer(partial, config.model_type)
    try:
        _add_config(writer, config, target.stem, chosen)
        add_tokenizer(writer, tokenizer, _rows(folder))
        _write_tensors(writer, folder, config, chosen)
        writer.close()
        partial.rename(target)
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise UserInputError(problem, where=str(target), hint="is the disk full?") from error
    finally:
        partial.unlink(missing_ok=True)


def check_supported(config: Any) -> None:
    """Raise `UserInputError` if a model's architecture or one of its options is not supported."""
    names = config.architectures or ["unknown"]
    if config.model_type not in _ARCHITECTURES or not str(names[0]).endswith("ForCausalLM"):
        known = ", ".join(_ARCHITECTURES)
        raise UserInputError(f"{names[0]} is not supported (causal LMs of {known} are)", where=WHERE, hint=_HINT)
    rope = _rope(config)
    unsupported = {
        "attention_bias": config.model_type != "qwen2" and getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_sliding_window": getattr(config, "use_sliding_window", False),
        f"hidden_act: {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
        f"rope_type: {rope['rope_type']}": rope["rope_type"] not in ("default", "llama3"),
    }
    if found := [name for name, is_set in unsupported.items() if is_set]:
        raise UserInputError(f"its config has {', '.join(found)}, which is not supported", where=WHERE, hint=_HINT)


def _rope(config: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, **(config.rope_parameters or {})}


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add_config(writer: GGUFWriter, config: Any, name: str, dtype: Dtype) -> None:
    from gguf import LlamaFileType

    types = {"float32": LlamaFileType.ALL_F32, "float16": LlamaFileType.MOSTLY_F16}
    head_dim = _head_dim(config)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(types.get(dtype, LlamaFileType.MOSTLY_BF16))
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(_rope(config)["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _rows(folder: Path) -> int:
    return next(int(tensor.shape[0]) for name, tensor in read_weights(folder) if name == _EMBEDDINGS)


def _write_tensors(writer: GGUFWriter, folder: Path, config: Any, dtype: Dtype) -> None:
    """Write the tensors one at a time: first their shapes, then their values."""
    from gguf import GGMLQuantizationType

    for name, tensor in _tensors(folder, config):
        array, is_bfloat16 = _array(name, tensor, dtype)
        kind = GGMLQuantizationType.BF16 if is_bfloat16 else None
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in _tensors(folder, config):
        writer.write_tensor_data(_array(name, tensor, dtype)[0])


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under their names in GGUF, with the rows of llama's queries and keys in its order."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads or config.num_attention_heads}
    if (factors := rope_factors(config)) is not None:
        yield "rope_freqs.weight", factors
    for name, tensor in read_weights(folder):
        if name.endswith(_SKIPPED) or (name == _HEAD and config.tie_word_embeddings):
            continue
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise UserInputError(f"{name} is not a tensor of {config.model_type}", where=str(folder), hint=_HINT)
        layer = name.split(".")[-2]
        if config.model_type == "llama" and layer in heads:
            tensor = interleaved(tensor, heads[layer])
        yield mapped, tensor


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of llama's queries or keys from halves to pairs, which llama.cpp rotates.

    Args:
        weight: [heads * head_dim, …], where rows i and i + head_dim / 2 of a head are rotated together.
        num_heads: number of heads.

    Returns:
        The same rows, where 2i and 2i + 1 of a head are rotated together.

    Example:
        >>> import torch
        >>> interleaved(torch.arange(8).unsqueeze(1), 2).flatten().tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
    """
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def rope_factors(config: Any) -> Tensor | None:
    """Return the divisors of the rotary frequencies for `rope_type: llama3`, None for the default.

    Long wavelengths are stretched by `factor`, short ones are kept, with a smooth transition (Llama 3.1).

    Args:
        config: transformers config.

    Returns:
        [head_dim / 2], float32.
    """
    import torch

    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    head_dim = _head_dim(config)
    frequencies = float(rope["rope_theta"]) ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    periods = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    share = ((periods - low) / (high - low)).clamp(0.0, 1.0)
    factors: Tensor = 1.0 / ((1.0 - share) / factor + share)
    return factors.float()


def _array(name: str, tensor: Tensor, dtype: Dtype) -> tuple[np.ndarray[Any, Any], bool]:
    """Return a tensor's array, and whether its 16-bit integers are the bits of bfloat16, which numpy lacks."""
    import torch

    if tensor.dim() == 1 or dtype == "float32":
        return tensor.float().contiguous().numpy(), False
    if dtype == "bfloat16":
        return tensor.bfloat16().contiguous().view(torch.int16).numpy(), True
    half = tensor.half().contiguous()
    if not torch.isfinite(half).all():
        raise UserInputError(f"{name} does not fit into float16", where=WHERE, hint="--dtype bfloat16 or float32")
    return half.numpy(), False
