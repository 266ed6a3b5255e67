@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    ...

def build_character_tokenizer(characters: str) -> PreTrainedTokenizerBase:
    ...

def build_llama(tokenizer: PreTrainedTokenizerBase, *, hidden_size: int, num_layers: int, num_heads: int, seed: int) -> PreTrainedModel:
    ...

def carries_state(config: Any) -> bool:
    ...

def causal_lm_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, *, logits_to_keep: int | None=None, signature_of: nn.Module | None=None) -> Tensor:
    ...

def disable_dropout(model: nn.Module) -> None:
    ...

def eos_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ...

@contextmanager
def explained_compiling(what: str, option: str) -> Iterator[None]:
    ...

def feels_padding(config: Any, forward_parameters: Iterable[str]) -> str | None:
    ...

def innermost(module: nn.Module) -> nn.Module:
    ...

def is_lora(model: nn.Module) -> bool:
    ...

def last_token_scores(model: Any, rows: Sequence[Tensor], device: torch.device) -> Tensor:
    ...

def load_policy(config: ModelConfig, *, dtype: torch.dtype, seed: int, tokenizer: PreTrainedTokenizerBase | None=None, kind: ModelKind='causal-lm') -> PreTrainedModel:
    ...

def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    ...

def merged_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ...

MIN_MULTIPLICATIONS = 1 << 22

def next_token_logits(model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    ...

@contextmanager
def own_lengths(model: nn.Module, lengths: Tensor) -> Iterator[None]:
    ...

@dataclass(frozen=True, slots=True)
class Packing:
    places: Tensor
    num_rows: int
    width: int

    @classmethod
    def of(cls, attention_mask: Tensor) -> Packing:
        ...

    def as_rows(self, packed: Tensor) -> Tensor:
        ...

    def as_packed(self, rows: Tensor) -> Tensor:
        ...

def policy_forward(model: nn.Module, experience: Experience, temperature: float, *, with_entropy: bool=False, entropy_grad: bool=True, signature_of: nn.Module | None=None) -> PolicyOutput:
    ...

@contextmanager
def quiet_progress() -> Iterator[None]:
    ...

class ReferencePass:

    def __init__(self, strategy: Strategy, *, temperature: float, reference: nn.Module | None=None, reference_context: Callable[[], AbstractContextManager[Any]]=nullcontext, critic: nn.Module | None=None, batch_tokens: int | None=None, offload: bool=False) -> None:
        ...

    def run(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        ...

@dataclass(frozen=True, slots=True)
class RowLengths:
    switches: frozenset[int]
    limit: int | None

    @classmethod
    def of(cls, model: nn.Module) -> RowLengths | None:
        ...

    @property
    def kind(self) -> str:
        ...

    def begins_anew(self, length: int) -> bool:
        ...

def takes_packed_rows(model: nn.Module) -> bool:
    ...

def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    ...

def value_forward(critic: nn.Module, experience: Experience) -> Tensor:
    ...

def with_trainer_log_probs(items: Sequence[BufferItem], policy: nn.Module, strategy: Strategy, *, empty: BufferItem, shared: bool, temperature: float, batch_tokens: int | None) -> list[BufferItem]:
    ...

def write_model_config(model: Any, dtype: torch.dtype, path: Path) -> None:
    ...

def write_transformers_folder(model: Any, weights: dict[str, torch.Tensor], path: Path) -> None:
    ...
