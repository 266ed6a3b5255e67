"""Causal LMs from transformers, with PEFT adapters, and the base class of other transformers model kinds.

`model.path` is a folder, a hub name, or `builtin:NAME`. Built-in models ship in this package as a config and tokenizer
without weights, for the quickstart and tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rlhf_core.config import ModelConfig
from rlhf_core.config.sections import LoraConfig
from rlhf_core.errors import CheckpointError, UserInputError, first_line
from rlhf_core.models import ModelKind, model_kind_for
from rlhf_core.models.kinds import MARK, WHERE

from .adapter_options import check_adapter_options
from .adapter_start import START, start_adapter_active
from .adapters import is_lora, merged_weights, new_adapter, save_adapter
from .chat_options import set_chat_options
from .files import check_hub, check_layers, check_name
from .folders import quiet_progress, replacing_folder, write_transformers_folder
from .gradient_checkpointing import enable_gradient_checkpointing
from .noise import disable_dropout, disable_training_noise
from .peft_warnings import silence_peft
from .quantized import quantize

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
    """Context in which `load(path, dtype)` loads causal LMs. If it returns None, the model is loaded as usual."""
    token = _loader.set(load)
    try:
        yield
    finally:
        _loader.reset(token)


def load_tokenizer(config: ModelConfig) -> Any:
    """Load the tokenizer of `model.path` with the `model.chat` options applied, whatever the model's kind.

    Args:
        config: the `model:` section of a run file.

    Returns:
        The tokenizer, as `ModelKind.load_tokenizer` returns it.
    """
    return model_kind_for(config).load_tokenizer()


def load_policy(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    kind: str = "causal-lm",
) -> Any:
    """Load the model of `model.path` as its kind does.

    Args:
        config: the `model:` section of a run file.
        dtype: floating-point type of the weights.
        seed: seed for weights that are not in the files, and for a new adapter.
        tokenizer: the model's tokenizer, or None for a model that only runs forward passes.
        kind: the kind that the algorithm trains (`Algorithm.model_kind`). Another kind of model is an error.

    Returns:
        The model on the CPU, see `ModelKind.load_policy`.
    """
    return model_kind_for(config, kind).load_policy(dtype=dtype, seed=seed, tokenizer=tokenizer)


class CausalLM(ModelKind):
    """A causal LM from transformers. Custom kinds override `load`, `add_adapter` and `save` as needed.

    This class handles the rest: dropout, `model.gradient_checkpointing`, `model.lora`, and merging an adapter into the
    saved weights.
    """

    peft_task: ClassVar[str] = "CAUSAL_LM"
    auto_class: ClassVar[str] = _CAUSAL
    """Name of the transformers auto class that loads the model. `rlhf plan` builds models of classes that set it
    themselves from their config, and loads those of other subclasses."""

    def check(self) -> None:
        """Check the path as far as possible without loading weights.

        Raises:
            UserInputError: the path is not a loadable model folder or a possible hub name.
        """
        path = self.model.path
        check_adapter_options(self.model)
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
            hint = f"it is a run folder: its model is {folder / 'model'}" if is_run else None
            raise UserInputError(
                f"{path!r} is not a transformers model folder: it lacks config.json", where=WHERE, hint=hint
            )
        if not any(folder.glob("*.safetensors")):
            raise UserInputError(
                f"{path!r} contains no *.safetensors weights",
                where=WHERE,
                hint="save the model with save_pretrained(...) (pickled .bin weights are not loaded)",
            )
        if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
            raise UserInputError(
                f"{path!r} lacks a tokenizer", where=WHERE, hint="tokenizer.save_pretrained(folder) adds it"
            )

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer with the `model.chat` options applied.

        If it lacks a pad token, EOS is used. Masks never depend on the pad token.

        Raises:
            UserInputError: the tokenizer cannot be loaded.
        """
        tokenizer: PreTrainedTokenizerBase = self.read_tokenizer()
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if self.model.chat is not None:
            set_chat_options(tokenizer, self.model.chat)
        return tokenizer

    def read_tokenizer(self) -> Any:
        """Read the tokenizer of the path, before options are applied.

        Raises:
            UserInputError: the tokenizer cannot be loaded.
        """
        from transformers import AutoTokenizer

        config = self.model
        path = config.path
        if path.startswith(PREFIX):
            path = str(_builtin_folder(path))
        check_hub(path, where=WHERE)
        try:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        except Exception as error:  # `tokenizers` raises plain exceptions on a broken file
            raise UserInputError(
                f"cannot load the tokenizer of {config.path!r}: {first_line(error)}",
                where=WHERE,
                hint=None if Path(config.path).exists() else "check the name and the network, or use a model folder",
            ) from error

    def check_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that every token of the policy's vocabulary has the same id here, since the model encodes no text."""
        ours, its = tokenizer.get_vocab(), self.load_tokenizer().get_vocab()
        different = [token for token in sorted(ours, key=ours.__getitem__) if its.get(token) != ours[token]]
        if different:
            token = different[0]
            raise UserInputError(
                f"{self.model.path!r} has a different tokenizer than the policy: {len(different)} of the policy's "
                f"{len(ours)} tokens differ, the first is {token!r}: {ours[token]} in the policy, "
                f"{its.get(token, 'missing')} in this model",
                where=WHERE,
                hint="use a model of the policy's family, which has the same tokens",
            )

    def load_policy(
        self, *, dtype: torch.dtype, seed: int, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> PreTrainedModel:
        check_adapter_options(self.model)  # again, since a subclass may have replaced `check`
        model = self.load(dtype=dtype, seed=seed, tokenizer=tokenizer)
        for part in (model, model.base_model):
            setattr(part, MARK, self)
        disable_dropout(model)
        num_embeddings = cast(int, model.get_input_embeddings().num_embeddings)
        if tokenizer is not None and num_embeddings < len(tokenizer):
            raise UserInputError(
                f"the tokenizer has {len(tokenizer)} tokens, the model {num_embeddings}",
                where=WHERE,
                hint="the tokenizer in the folder belongs to another model",
            )
        if self.model.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        if self.model.quantize is not None:
            quantize(model, self.model.quantize)
        return model if self.model.lora is None else self.add_adapter(model, self.model.lora, seed)

    def load(self, *, dtype: torch.dtype, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
        """Load the model on the CPU, without an adapter, identically in every process.

        Args:
            dtype: floating-point type of the weights.
            seed: seed for weights that are not in the files.
            tokenizer: the model's tokenizer, or None for a model that only runs forward passes.

        Raises:
            UserInputError: the model cannot be loaded.
        """
        if not self.model.path.startswith(PREFIX):
            return from_files(self.model, dtype, self.auto_class)
        model = _build_builtin(self.model.path, seed)
        model.to(dtype)  # type: ignore[arg-type]
        return model

    def add_adapter(self, model: PreTrainedModel, options: LoraConfig, seed: int) -> PreTrainedModel:
        """Wrap the model in a PEFT adapter, initialized from `seed`. With it disabled, the model is unchanged.

        Args:
            model: the loaded model.
            options: the `model.lora` section.
            seed: seed of the adapter's weights.
        """
        return new_adapter(model, options, seed, self.peft_task)

    def disable_noise(self, model: nn.Module, *, adapters: bool) -> None:
        if adapters:
            disable_dropout(model)
        disable_training_noise(model)

    def adapter_off(self, model: nn.Module) -> Callable[[], AbstractContextManager[Any]] | None:
        if START in getattr(model, "peft_config", ()):
            return partial(start_adapter_active, model)
        return super().adapter_off(model)

    def save_policy(
        self, model: nn.Module, weights: dict[str, Tensor], tokenizer: Any, folder: Path, adapter: Path
    ) -> None:
        from safetensors import SafetensorError

        try:
            base: Any = model
            if is_lora(model):
                with replacing_folder(adapter) as partial:
                    save_adapter(model, weights, partial)
                base = model.get_base_model()  # type: ignore[operator]
            weights = merged_weights(model, weights)
            with replacing_folder(folder) as partial:
                self.save(base, weights, tokenizer, partial)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the model cannot be written: {error}",
                where=str(folder),
                hint="is the disk full? free some space, then continue with --resume auto: the newest checkpoint is "
                "complete",
            ) from error

    def save(self, model: Any, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
        """Write the model and tokenizer to an empty folder that `load` can read.

        Args:
            model: the model without adapters.
            weights: its full state, with any adapter merged, by name.
            tokenizer: the model's tokenizer.
            folder: empty folder to write to.
        """
        write_transformers_folder(model, weights, folder)
        tokenizer.save_pretrained(folder)


def eos_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all tokens that end an answer, from the model's generation config and the tokenizer.

    Args:
        model: transformers model. Its `generation_config.eos_token_id` may be an id, a list or None.
        tokenizer: its tokenizer, whose `eos_token_id` is included.

    Example:
        >>> from types import SimpleNamespace
        >>> model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7, 9]))
        >>> sorted(eos_token_ids(model, SimpleNamespace(eos_token_id=2)))
        [2, 7, 9]
    """
    ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for eos in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        ids.update(eos if isinstance(eos, (list, tuple)) else () if eos is None else (eos,))
    return frozenset(int(token) for token in ids)


def _builtin_folder(path: str) -> Path:
    """Folder with the config and tokenizer of `builtin:NAME`. Raises `UserInputError` for an unknown name."""
    names = sorted(each.name for each in _BUILTIN.iterdir())
    if (name := path.removeprefix(PREFIX)) not in names:
        raise UserInputError(
            f"there is no built-in model {name!r}",
            where="model.path",
            hint=f"one of {', '.join(PREFIX + each for each in names)}, a model folder, or a hub name",
        )
    return _BUILTIN / name


def _build_builtin(path: str, seed: int) -> PreTrainedModel:
    """Build `builtin:NAME` in float32, with weights that depend on `seed` only."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(_builtin_folder(path))
    config.name_or_path = ""  # else an adapter would record that folder, without weights, as its base
    # Initialization draws from torch's global generator. The fork restores its state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def from_files(config: ModelConfig, dtype: torch.dtype, auto_class: str = _CAUSAL, **options: Any) -> PreTrainedModel:
    """Load a model from a folder or hub name. A PEFT adapter folder is merged into its base model.

    Args:
        config: the `model:` section of a run file.
        dtype: floating-point type of the weights.
        auto_class: name of the transformers auto class that loads the model.
        **options: passed to its `from_pretrained`.

    Returns:
        The model on the CPU.

    Raises:
        UserInputError: the files cannot be loaded, or weights are missing and `model.allow_missing_weights` is off.
    """
    import transformers

    options |= {"dtype": dtype, "use_safetensors": True, "trust_remote_code": config.trust_remote_code}
    check_layers(Path(config.path), WHERE, fetch=True)
    try:
        with quiet_progress():
            if auto_class == _CAUSAL and (Path(config.path) / "adapter_config.json").exists():
                silence_peft()
                from peft import AutoPeftModelForCausalLM

                merged = AutoPeftModelForCausalLM.from_pretrained(config.path, **options).merge_and_unload()
                return merged.requires_grad_(True)  # type: ignore[no-any-return]  # peft froze the base
            load = None if config.trust_remote_code or auto_class != _CAUSAL else _loader.get()
            if load is not None and (loaded := load(config.path, dtype)) is not None:
                return loaded
            kinds = getattr(transformers, auto_class)
            model, info = kinds.from_pretrained(config.path, output_loading_info=True, **options)
    except Exception as error:  # its class depends on the library that reads the broken file
        raise UserInputError(f"cannot load {config.path!r}: {first_line(error)}", where=WHERE) from error
    _check_missing(config, sorted(info["missing_keys"]))
    return model  # type: ignore[no-any-return]


def _check_missing(config: ModelConfig, missing: Sequence[str]) -> None:
    """Raise `UserInputError` for weights missing from the files and randomly initialized, unless config allows it."""
    if not missing or config.allow_missing_weights:
        return
    more = f" and {len(missing) - _SHOWN_WEIGHTS} more" if len(missing) > _SHOWN_WEIGHTS else ""
    raise UserInputError(
        f"the files of {config.path!r} lack {', '.join(missing[:_SHOWN_WEIGHTS])}{more}",
        where=WHERE,
        hint="get the complete model, or set model.allow_missing_weights: true to start these from random numbers",
    )
