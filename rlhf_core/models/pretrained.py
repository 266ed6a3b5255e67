"""Models of transformers: checked, loaded, fed, adapted with PEFT, and written. What another kind does otherwise.

`model.path` is a folder, a hub name, or `builtin:NAME`: a folder of core without weights, for the quickstart and tests.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from ..columns import Column
from ..config.sections import LoraConfig, ModelConfig
from ..errors import UserInputError, first_line
from .files import check_hub, check_layers, check_name, config_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WHERE = "model.path"
PREFIX = "builtin:"
_BUILTIN = Path(__file__).parent / "builtin_models"
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


class ModelKind:
    """How models of a kind are checked, loaded, fed, adapted and saved; as it is, a causal LM of transformers.

    A plugin's `build` is a subclass, or returns an instance of one. Core keeps an instance with each loaded model, also
    in copies of it, so it should hold options only.
    """

    model_kind = "causal-lm"
    """`Algorithm.model_kind` of the algorithms that it is for."""
    peft_task: ClassVar[str] = "CAUSAL_LM"
    columns: Mapping[str, Column] = {}
    """The columns, each per prompt, that `encode` fills."""

    def __init__(self, options: BaseModel | None = None, model: ModelConfig | None = None) -> None:
        """model: the run's section `model`."""
        self.model = model or ModelConfig(path=PREFIX)

    @property
    def inputs_differ(self) -> bool:
        """Whether `inputs` is overridden: forward passes are then made of whole, padded rows."""
        return type(self).inputs is not ModelKind.inputs

    def check(self) -> None:
        """Check the path as far as possible without loading weights. Raises `UserInputError`."""
        path = self.model.path
        if path.startswith(PREFIX):
            _builtin_folder(path)
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

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, whose pad token is EOS if it has none. Raises `UserInputError`."""
        from transformers import AutoTokenizer

        config = self.model
        path = config.path
        if path.startswith(PREFIX):
            path = str(_builtin_folder(path))
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

    def load(self, *, dtype: torch.dtype, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
        """The model on the CPU, without an adapter, the same in every process. Raises `UserInputError`.

        seed: of weights that are not in its files. tokenizer: None for a model that is only run forward.
        """
        return _load(self.model, dtype, seed)

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
        import torch

        _silence_bitsandbytes()
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
        from transformers.pytorch_utils import Conv1D

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = get_peft_model(
                model,
                PeftConfig(
                    task_type=self.peft_task,
                    r=options.r,
                    # Set explicitly, or peft warns about every such layer.
                    fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
                    lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft only ever divides it by r
                    lora_dropout=options.dropout,
                    target_modules=list(options.target_modules) if options.target_modules else "all-linear",
                ),
            )
        if any("lora_embedding_" in name for name, _ in adapted.named_parameters()):
            raise UserInputError(
                "adapters on embedding layers are not supported",
                where="model.lora.target_modules",
                hint="name linear layers only, or set it to null for all of them",
            )
        return adapted  # type: ignore[return-value]

    def save(self, model: Any, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
        """Write `weights`, the full state of `model` with any adapter merged, to an empty folder for `load`."""
        write_transformers_folder(model, weights, folder)
        tokenizer.save_pretrained(folder)


class Classifier(ModelKind):
    """A score model: transformers' sequence classification with one label, on a causal LM's weights if need be.

    With an adapter its head is trained in full, beside it.
    """

    model_kind = "sequence-classification"
    peft_task = "SEQ_CLS"

    def load(self, *, dtype: torch.dtype, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
        if tokenizer is None:
            raise ValueError("a score model needs the tokenizer")
        return as_score_model(_load(self.model, dtype, seed, scores=True), tokenizer)


def _builtin_folder(path: str) -> Path:
    """Config and tokenizer of `builtin:NAME`. Raises `UserInputError` where there is no such built-in model."""
    names = sorted(each.name for each in _BUILTIN.iterdir())
    if (name := path.removeprefix(PREFIX)) not in names:
        raise UserInputError(
            f"there is no built-in model {name!r}",
            where="model.path",
            hint=f"one of {', '.join(PREFIX + each for each in names)}, a model folder, or a hub name",
        )
    return _BUILTIN / name


def _build_builtin(path: str, seed: int) -> PreTrainedModel:
    """The model of `builtin:NAME` in float32, the same for the same seed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(_builtin_folder(path))
    config.name_or_path = ""  # an adapter would name core's folder, which has no weights, as its base
    # Initialisation draws from torch's global generator; the fork keeps it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def _load(config: ModelConfig, dtype: torch.dtype, seed: int, *, scores: bool = False) -> PreTrainedModel:
    """The causal LM of `model.path`, an adapter merged into its base; with `scores` a score model if the path is one.

    Raises `UserInputError`.
    """
    if config.path.startswith(PREFIX):
        model = _build_builtin(config.path, seed)
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
            _silence_bitsandbytes()
            from peft import AutoPeftModelForCausalLM

            merged = AutoPeftModelForCausalLM.from_pretrained(config.path, **options).merge_and_unload()
            return merged.requires_grad_(True)  # type: ignore[no-any-return]  # peft had frozen the base
        if scores and _is_score_folder(config.path):
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


def _is_score_folder(path: str) -> bool:
    """Whether a model folder declares a sequence-classification model."""
    names = config_of(path).get("architectures") or []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def as_score_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A score model on the causal LM's weights; an existing score model is returned as it is.

    A new head starts at zero, so it predicts 0 everywhere, independent of the seed. transformers reads the score at
    the rightmost token that is not padding, so the tokenizer's pad token is set in the config.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    if type(model).__name__.endswith("ForSequenceClassification"):
        model.config.pad_token_id = tokenizer.pad_token_id
        return model
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    try:
        # Initialisation draws from torch's global generator; the fork keeps it as it was.
        with torch.random.fork_rng(devices=[]):
            scoring = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise UserInputError(
            f"transformers has no sequence-classification model of type {config.model_type!r}",
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


def _silence_bitsandbytes() -> None:
    """Keep bitsandbytes, which peft imports where it is installed, from asking for kernels that nothing here uses."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
