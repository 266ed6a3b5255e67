"""Loading policies and tokenizers of any kind; LoRA; saving the final model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..config.sections import ModelConfig
from ..errors import CheckpointError, UserInputError
from ..util.files import replacing_folder
from .chat_options import set_chat_options
from .kinds import KIND, kind_for, kind_of
from .pretrained import WHERE

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NOISE_RATES = ("layerdrop", "jitter_noise", "input_jitter_noise", "moe_jitter_eps")


def check_model(config: ModelConfig) -> None:
    """Check `model.path` as far as possible without loading weights. Raises `UserInputError`, or `PluginError`."""
    kind_for(config).check()


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.path` with the options of `model.chat`.

    Its pad token is set to EOS where it has none; masks never depend on it.
    """
    tokenizer = kind_for(config).load_tokenizer()
    if config.chat is not None:
        set_chat_options(tokenizer, config.chat)
    return tokenizer


def load_policy(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    kind: str = "causal-lm",
) -> PreTrainedModel:
    """The model of `model.path`, on the CPU, with dropout off and, if configured, a fresh LoRA adapter.

    If the path is an adapter, it is merged into its base first, so that "adapter off" is the start policy. kind: as
    `Algorithm.model_kind`; sequence-classification, which needs the tokenizer, gives a score model.
    """
    own = kind_for(config, kind)
    model = own.load(dtype=dtype, seed=seed, tokenizer=tokenizer)
    for part in (model, model.base_model):
        setattr(part, KIND, own)
    disable_dropout(model)
    num_embeddings = cast(int, model.get_input_embeddings().num_embeddings)
    if tokenizer is not None and num_embeddings < len(tokenizer):
        raise UserInputError(
            f"the tokenizer knows {len(tokenizer)} tokens, the model {num_embeddings}",
            where=WHERE,
            hint="the tokenizer in the folder belongs to another model",
        )
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model if config.lora is None else own.add_adapter(model, config.lora, seed)


def is_lora(model: nn.Module) -> bool:
    """Whether PEFT adapters are on the model."""
    return hasattr(model, "disable_adapter") and hasattr(model, "peft_config")


def is_adapter_weight(name: str) -> bool:
    """Whether a state-dict name belongs to the trained adapter (or to a module trained beside it)."""
    return "lora_" in name or "modules_to_save" in name


def eos_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All tokens that end an answer: those of the model's generation config, and the tokenizer's."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for given in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        found.update(given if isinstance(given, (list, tuple)) else () if given is None else (given,))
    return frozenset(int(token) for token in found)


def disable_dropout(model: nn.Module) -> None:
    """Switch off all randomness in training mode, so that rollout and update compute log-probs by the same function.

    Adapters included. Training mode itself stays on, since gradient checkpointing requires it.
    """
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        # Rates that a forward passes to a function, or uses to skip layers or add router noise.
        _zero_rates(module, lambda name: _is_dropout(name) or name in _NOISE_RATES)
        if hasattr(config := getattr(module, "config", None), "model_type"):
            _zero_rates(config, _is_dropout)  # some models read the rates from the config in each forward


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith("pdrop")


def _zero_rates(owner: object, is_rate: Callable[[str], bool]) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and is_rate(name):
            setattr(owner, name, 0.0)


def save_plain_model(
    model: nn.Module, weights: dict[str, torch.Tensor], tokenizer: Any, path: Path, adapter: Path | None = None
) -> None:
    """Write a folder as the model's kind does: `weights` are the full state of `model` (LoRA merged here).

    Atomic; what was at `path` is replaced. With LoRA the adapter itself is written too, to the folder `adapter`.

    Raises:
        CheckpointError: the disk does not take it; nothing half written is left.
    """
    from safetensors import SafetensorError

    try:
        if is_lora(model) and adapter is not None:
            with replacing_folder(adapter) as partial:
                save_adapter(model, weights, partial)
        with replacing_folder(path) as partial:
            base: Any = model
            if is_lora(model):
                base, weights = model.get_base_model(), merged_weights(model, weights)  # type: ignore[operator]
            kind_of(base).save(base, weights, tokenizer, partial)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the model cannot be written: {error}",
            where=str(path),
            hint="is the disk full? free some space; --resume auto goes on from the newest checkpoint, which is whole",
        ) from error


def merged_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Base weights with every LoRA increment added once, under the base model's names. `model` is unchanged.

    Increments are added in float32: 16 bits would lose most of their digits.
    """
    from peft.tuners.lora import LoraLayer

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    prefix = "base_model.model."
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if ".modules_to_save." in name:  # trained in full, in place of `original_module`
            module_name, _, rest = name.partition(".modules_to_save.")
            merged[f"{module_name}.{rest.partition('.')[2]}".removeprefix(prefix)] = tensor
        if is_adapter_weight(name) or ".original_module." in name:
            continue
        module_name, _, leaf = name.rpartition(".")
        owner = module_name.removesuffix(".base_layer")
        layer = layers.get(owner)
        if layer is not None and leaf == "weight":
            for adapter in layer.active_adapters:
                down = weights[f"{owner}.lora_A.{adapter}.weight"].float()
                up = weights[f"{owner}.lora_B.{adapter}.weight"].float()
                increment = (up @ down) * layer.scaling[adapter]
                if getattr(layer, "fan_in_fan_out", False):
                    increment = increment.T
                tensor = tensor.float() + increment
        merged[f"{owner}.{leaf}".removeprefix(prefix)] = tensor
    return merged


def save_adapter(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write a folder that PEFT loads: the adapter of a LoRA `model`, of whose full state `weights` are."""
    cast("PeftModel", model).save_pretrained(str(path), state_dict=weights, save_embedding_layers=False)
    (path / "README.md").unlink(missing_ok=True)  # a form for a model's card
