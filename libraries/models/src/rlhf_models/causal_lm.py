"""Causal LMs of transformers, with PEFT adapters; the base of other kinds of models of transformers.

`model.path` is a folder, a hub name, or `builtin:NAME`: a folder here without weights, for the quickstart and tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rlhf_core.config import ModelConfig
from rlhf_core.config.sections import LoraConfig
from rlhf_core.errors import CheckpointError, UserInputError, first_line
from rlhf_core.models import ModelKind, model_kind_for
from rlhf_core.models.kinds import MARK, WHERE

from .adapters import is_lora, merged_weights, new_adapter, save_adapter, silence_bitsandbytes
from .chat_options import set_chat_options
from .files import check_hub, check_layers, check_name
from .folders import quiet_progress, replacing_folder, write_transformers_folder
from .noise import disable_dropout, disable_training_noise

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFIX = "builtin:"
_CAUSAL = "AutoModelForCausalLM"
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


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of `model.path`, of whichever kind the model is, with the options of `model.chat`."""
    return model_kind_for(config).load_tokenizer()


def load_policy(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    kind: str = "causal-lm",
) -> Any:
    """The model of `model.path` as its kind loads it; see `ModelKind.load_policy`. kind: as `Algorithm.model_kind`."""
    return model_kind_for(config, kind).load_policy(dtype=dtype, seed=seed, tokenizer=tokenizer)


class CausalLM(ModelKind):
    """A causal LM of transformers. A kind of your own overrides `load`, `add_adapter` and `save` as it needs.

    The rest is here: dropout, `model.gradient_checkpointing`, `model.lora`, and the merging of an adapter into the
    weights that are saved.
    """

    peft_task: ClassVar[str] = "CAUSAL_LM"

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
        """The tokenizer with the options of `model.chat`. Raises `UserInputError`.

        Its pad token is set to EOS where it has none; masks never depend on it.
        """
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
        if config.chat is not None:
            set_chat_options(tokenizer, config.chat)
        return tokenizer

    def check_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """What is compared is which text each id of the policy stands for: the model encodes nothing."""
        ours, its = tokenizer.get_vocab(), self.load_tokenizer().get_vocab()
        different = [token for token in sorted(ours, key=ours.__getitem__) if its.get(token) != ours[token]]
        if different:
            token = different[0]
            raise UserInputError(
                f"{self.model.path!r} has another tokenizer than the policy: {len(different)} of the policy's "
                f"{len(ours)} tokens differ, the first is {token!r}: {ours[token]} here, "
                f"{its.get(token, 'absent')} there",
                where=WHERE,
                hint="take a model of the policy's own family, whose tokens are the same",
            )

    def load_policy(
        self, *, dtype: torch.dtype, seed: int, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> PreTrainedModel:
        model = self.load(dtype=dtype, seed=seed, tokenizer=tokenizer)
        for part in (model, model.base_model):
            setattr(part, MARK, self)
        disable_dropout(model)
        num_embeddings = cast(int, model.get_input_embeddings().num_embeddings)
        if tokenizer is not None and num_embeddings < len(tokenizer):
            raise UserInputError(
                f"the tokenizer knows {len(tokenizer)} tokens, the model {num_embeddings}",
                where=WHERE,
                hint="the tokenizer in the folder belongs to another model",
            )
        if self.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model if self.model.lora is None else self.add_adapter(model, self.model.lora, seed)

    def load(self, *, dtype: torch.dtype, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
        """The model on the CPU, without an adapter, the same in every process. Raises `UserInputError`.

        seed: of weights that are not in its files. tokenizer: None for a model that is only run forward.
        """
        if not self.model.path.startswith(PREFIX):
            return from_files(self.model, dtype)
        model = _build_builtin(self.model.path, seed)
        model.to(dtype)  # type: ignore[arg-type]
        return model

    def add_adapter(self, model: PreTrainedModel, options: LoraConfig, seed: int) -> PreTrainedModel:
        """The model in a PEFT adapter of `model.lora`, initialised from `seed`; without it, the model is as before."""
        return new_adapter(model, options, seed, self.peft_task)

    def disable_noise(self, model: nn.Module, *, adapters: bool) -> None:
        if adapters:
            disable_dropout(model)
        disable_training_noise(model)

    def save_policy(
        self, model: nn.Module, weights: dict[str, Tensor], tokenizer: Any, folder: Path, adapter: Path
    ) -> None:
        from safetensors import SafetensorError

        try:
            base: Any = model
            if is_lora(model):
                with replacing_folder(adapter) as partial:
                    save_adapter(model, weights, partial)
                base, weights = model.get_base_model(), merged_weights(model, weights)  # type: ignore[operator]
            with replacing_folder(folder) as partial:
                self.save(base, weights, tokenizer, partial)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the model cannot be written: {error}",
                where=str(folder),
                hint="is the disk full? free some space; --resume auto goes on from the newest checkpoint, which is "
                "whole",
            ) from error

    def save(self, model: Any, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
        """Write `weights`, the full state of `model` with any adapter merged, to an empty folder for `load`."""
        write_transformers_folder(model, weights, folder)
        tokenizer.save_pretrained(folder)


def eos_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All tokens that end an answer: those of the model's generation config, and the tokenizer's."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for given in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        found.update(given if isinstance(given, (list, tuple)) else () if given is None else (given,))
    return frozenset(int(token) for token in found)


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
    config.name_or_path = ""  # an adapter would name that folder, which has no weights, as its base
    # Initialisation draws from torch's global generator; the fork keeps it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def from_files(config: ModelConfig, dtype: torch.dtype, auto_class: str = _CAUSAL, **options: Any) -> PreTrainedModel:
    """The model of a folder or hub name, an adapter merged into its base. Raises `UserInputError`.

    auto_class: of transformers, which `options` are for.
    """
    import transformers

    options |= {"dtype": dtype, "use_safetensors": True, "trust_remote_code": config.trust_remote_code}
    check_layers(Path(config.path), WHERE, fetch=True)
    try:
        with quiet_progress():
            if auto_class == _CAUSAL and (Path(config.path) / "adapter_config.json").exists():
                silence_bitsandbytes()
                from peft import AutoPeftModelForCausalLM

                merged = AutoPeftModelForCausalLM.from_pretrained(config.path, **options).merge_and_unload()
                return merged.requires_grad_(True)  # type: ignore[no-any-return]  # peft had frozen the base
            load = None if config.trust_remote_code or auto_class != _CAUSAL else _loader.get()
            if load is not None and (loaded := load(config.path, dtype)) is not None:
                return loaded
            kinds = getattr(transformers, auto_class)
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
