"""Models of transformers: a folder, a hub name or `builtin:NAME`, checked, loaded, adapted with PEFT, and written."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.sections import LoraConfig, ModelConfig
from ..errors import UserInputError, first_line
from .builtin import PREFIX, build_builtin, builtin_folder
from .classifier import is_score_folder
from .config_check import check_layers
from .hub import check_hub, check_name

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WHERE = "model.path"
_SHOWN_WEIGHTS = 5
_loader: ContextVar[Callable[[str, torch.dtype], PreTrainedModel | None] | None] = ContextVar("loader", default=None)


@contextmanager
def loaded_by(load: Callable[[str, torch.dtype], PreTrainedModel | None]) -> Iterator[None]:
    """Context in which `load(path, dtype)` gives causal LMs; those for which it returns None are loaded as usual."""
    token = _loader.set(load)
    try:
        yield
    finally:
        _loader.reset(token)


def check_pretrained(config: ModelConfig) -> None:
    """Check `model.path` as far as possible without loading weights. Raises `UserInputError`."""
    path = config.path
    if path.startswith(PREFIX):
        builtin_folder(path)
        return
    folder = Path(path)
    check_name(path, where=WHERE)
    check_layers(folder, WHERE)
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


def pretrained_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.path`, whose pad token is EOS if it has none. Raises `UserInputError`."""
    from transformers import AutoTokenizer

    path = config.path
    if path.startswith(PREFIX):
        path = str(builtin_folder(path))
    check_hub(path, where=WHERE)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # `tokenizers` raises plain exceptions on a broken file
        raise UserInputError(
            f"cannot load the tokenizer of {config.path!r}: {first_line(error)}",
            where=WHERE,
            hint=None if Path(config.path).exists() else "check the name and the network, or give a model's folder",
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_pretrained(config: ModelConfig, dtype: torch.dtype, seed: int, *, scores: bool = False) -> PreTrainedModel:
    """The causal LM of `model.path`, an adapter merged into its base; with `scores` a score model if the path is one.

    Raises `UserInputError`.
    """
    if config.path.startswith(PREFIX):
        model = build_builtin(config.path, seed)
        model.to(dtype)  # type: ignore[arg-type]
        return model
    with quiet_progress():
        return _from_files(config, dtype, scores=scores)


def _from_files(config: ModelConfig, dtype: torch.dtype, *, scores: bool) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": config.trust_remote_code}
    check_layers(Path(config.path), WHERE, fetch=True)
    try:
        if (Path(config.path) / "adapter_config.json").exists():
            silence_bitsandbytes()
            from peft import AutoPeftModelForCausalLM

            merged = AutoPeftModelForCausalLM.from_pretrained(config.path, **options).merge_and_unload()
            return merged.requires_grad_(True)  # type: ignore[no-any-return]  # peft had frozen the base
        if scores and is_score_folder(config.path):
            kinds: Any = AutoModelForSequenceClassification
            options["num_labels"] = 1
        else:
            kinds = AutoModelForCausalLM
            load = None if config.trust_remote_code else _loader.get()
            if load is not None and (loaded := load(config.path, dtype)) is not None:
                return loaded
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


def add_lora(model: PreTrainedModel, config: LoraConfig, seed: int, task_type: str = "CAUSAL_LM") -> PreTrainedModel:
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
                task_type=task_type,
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
