"""Loading policies and tokenizers: a folder, a hub name, or `builtin:<name>`; LoRA; saving as plain transformers."""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..algorithm import ModelKind
from ..config.sections import LoraConfig, ModelConfig
from ..errors import CheckpointError, UserInputError, first_line
from ..util.atomic import replacing_folder
from .builtin import PREFIX, build_builtin, check_builtin
from .chat_options import set_chat_options
from .classifier import as_score_model, is_score_folder
from .config_check import check_layers
from .hub import check_hub, check_name

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WHERE = "model.path"
_SHOWN_WEIGHTS = 5
_NOISE_RATES = ("layerdrop", "jitter_noise", "input_jitter_noise", "moe_jitter_eps")


def check_model(config: ModelConfig) -> None:
    """Check `model.path` as far as possible without loading weights. Raises `UserInputError`."""
    path = config.path
    if path.startswith(PREFIX):
        check_builtin(path)
        return
    folder = Path(path)
    check_name(path, where=WHERE)
    if not os.path.exists(folder):
        return
    if not folder.is_dir():
        raise UserInputError(f"{path!r} is a file, not a model folder", where=WHERE)
    is_adapter = (folder / "adapter_config.json").exists()
    if not is_adapter and not (folder / "config.json").exists():
        is_run = (folder / "model" / "config.json").exists()
        hint = f"it is a run's folder: its model is {folder / 'model'}" if is_run else None
        raise UserInputError(
            f"{path!r} has no config.json, so it is no transformers model folder", where=WHERE, hint=hint
        )
    check_layers(folder, WHERE)
    if not any(folder.glob("*.safetensors")):
        raise UserInputError(
            f"{path!r} holds no *.safetensors weights",
            where=WHERE,
            hint="save the model with save_pretrained(...); pickled .bin weights are not loaded",
        )
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise UserInputError(
            f"{path!r} has no tokenizer", where=WHERE, hint="tokenizer.save_pretrained(folder) beside the model"
        )


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.path` with the options of `model.chat`.

    Its pad token is set to EOS where it has none; masks never depend on it.
    """
    tokenizer = _load_tokenizer(config)
    if config.chat is not None:
        set_chat_options(tokenizer, config.chat)
    return tokenizer


def _load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    if config.path.startswith(PREFIX):
        return build_builtin(config.path, 0)[1]
    from transformers import AutoTokenizer

    check_hub(config.path, where=WHERE)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # `tokenizers` raises plain exceptions on a broken file
        raise UserInputError(
            f"cannot load the tokenizer of {config.path!r}: {first_line(error)}",
            where=WHERE,
            hint=None if Path(config.path).exists() else "check the name and the network, or give a model's folder",
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    kind: ModelKind = "causal-lm",
) -> PreTrainedModel:
    """The causal LM of `model.path`, on the CPU, with dropout off and, if configured, a fresh LoRA adapter.

    If the path is an adapter, it is merged into its base first, so that "adapter off" is the start policy. With `kind`
    sequence-classification (which needs the tokenizer) the result is a score model.
    """
    if config.path.startswith(PREFIX):
        model = build_builtin(config.path, seed)[0]
        model.to(dtype)  # type: ignore[arg-type]
    else:
        with quiet_progress():
            model = _load_pretrained(config, dtype, kind)
    if kind == "sequence-classification":
        if tokenizer is None:
            raise ValueError("a score model needs the tokenizer")
        model = as_score_model(model, tokenizer)
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
    if config.lora is not None:
        return add_lora(model, config.lora, seed, kind)
    return model


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Silence transformers' progress bars for reading and writing weights, which would overwrite ours."""
    from transformers.utils import logging as of_transformers

    enabled = of_transformers.is_progress_bar_enabled()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            of_transformers.enable_progress_bar()


def silence_bitsandbytes() -> None:
    """Keep bitsandbytes, which peft imports where it is installed, from asking for kernels that nothing here uses."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def _load_pretrained(config: ModelConfig, dtype: torch.dtype, kind: ModelKind) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from ..strategies.stored_weights import load_stored

    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": config.trust_remote_code}
    try:
        if (Path(config.path) / "adapter_config.json").exists():
            silence_bitsandbytes()
            from peft import AutoPeftModelForCausalLM

            merged = AutoPeftModelForCausalLM.from_pretrained(config.path, **options).merge_and_unload()
            return merged.requires_grad_(True)  # type: ignore[no-any-return]  # peft had frozen the base
        if kind == "sequence-classification" and is_score_folder(config.path):
            kinds: Any = AutoModelForSequenceClassification
            options["num_labels"] = 1
        else:
            kinds = AutoModelForCausalLM
            if not config.trust_remote_code and (left := load_stored(config.path, dtype)) is not None:
                return left
        model, info = kinds.from_pretrained(config.path, output_loading_info=True, **options)
    except Exception as error:  # the class depends on which library reads the broken file
        raise UserInputError(f"cannot load {config.path!r}: {first_line(error)}", where=WHERE) from error
    _refuse_missing(config, sorted(info["missing_keys"]))
    return model  # type: ignore[no-any-return]


def _refuse_missing(config: ModelConfig, missing: Sequence[str]) -> None:
    """Raise `UserInputError` naming weights that are missing in the files and were newly initialised, unless wanted."""
    if not missing or config.allow_missing_weights:
        return
    more = f" and {len(missing) - _SHOWN_WEIGHTS} more" if len(missing) > _SHOWN_WEIGHTS else ""
    raise UserInputError(
        f"the files of {config.path!r} lack {', '.join(missing[:_SHOWN_WEIGHTS])}{more}",
        where=WHERE,
        hint="get the whole model; model.allow_missing_weights: true starts these from random numbers",
    )


def add_lora(model: PreTrainedModel, config: LoraConfig, seed: int, kind: ModelKind = "causal-lm") -> PreTrainedModel:
    """Wrap in a PEFT LoRA adapter, initialised from `seed`; the base stays frozen and is the reference."""
    import torch

    silence_bitsandbytes()
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers.pytorch_utils import Conv1D

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(
            model,
            PeftConfig(
                # A score model's head is trained in full, beside the adapter.
                task_type="CAUSAL_LM" if kind == "causal-lm" else "SEQ_CLS",
                r=config.r,
                # Set explicitly, or peft warns about every such layer.
                fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
                lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft only ever divides it by r
                lora_dropout=config.dropout,
                target_modules=list(config.target_modules) if config.target_modules else "all-linear",
            ),
        )
    if any("lora_embedding_" in name for name, _ in adapted.named_parameters()):
        raise UserInputError(
            "adapters on embedding layers are not supported",
            where="model.lora.target_modules",
            hint="name linear layers only, or set it to null for all of them",
        )
    return adapted  # type: ignore[return-value]


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


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The reference policy of a LoRA model: the same weights with the adapter switched off."""
    with model.disable_adapter():  # type: ignore[operator]
        yield


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
    """Write a folder that plain transformers loads: `weights` are the full state of `model` (LoRA merged here).

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
            if is_lora(model):
                merged = merged_weights(model, weights)
                write_transformers_folder(model.get_base_model(), merged, partial)  # type: ignore[operator]
            else:
                write_transformers_folder(model, weights, partial)
            tokenizer.save_pretrained(partial)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the model cannot be written: {error}",
            where=str(path),
            hint="is the disk full? free some space; --resume auto goes on from the newest checkpoint, which is whole",
        ) from error


def write_transformers_folder(model: Any, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write `weights`, the full state of the transformers `model`, as a folder that `from_pretrained` reads.

    All are stored in the widest of their types, which `config.json` names, so that reading them does not round. The
    module's own type may be narrower (under ZeRO and Gemini it computes in 16 bits, as do its frozen weights).
    """
    import torch

    floats = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    dtype = functools.reduce(torch.promote_types, floats)
    widened = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    with quiet_progress():
        model.save_pretrained(path, state_dict=widened)
    write_model_config(model, dtype, path)


def write_model_config(model: Any, dtype: torch.dtype, path: Path) -> None:
    """Write the `config.json` of the transformers `model` beside weights of type `dtype`, which it names."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(path)


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
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = get_peft_model_state_dict(model, state_dict=weights)
    path.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in state.items()}, path / "adapter_model.safetensors", {"format": "pt"})
    config = next(iter(model.peft_config.values())).to_dict()  # type: ignore[operator]
    plain = json.loads(json.dumps(config, default=lambda v: sorted(v) if isinstance(v, set) else str(v)))
    (path / "adapter_config.json").write_text(json.dumps(plain, indent=2))
