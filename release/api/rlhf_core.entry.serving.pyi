@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenModel:
    config: ModelConfig
    weights: Path | None = None

    @property
    def label(self) -> str:
        ...

class ServedModel:

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, *, max_new_tokens: int) -> None:
        ...

    async def answer(self, call: Call) -> Answer:
        ...

    def close(self) -> None:
        ...

def choose_model(path: str, *, best: bool=False, device: str='auto') -> ChosenModel:
    ...

def serve_model(chosen: ChosenModel, *, engine: str, seed: int, max_new_tokens: int) -> ServedModel:
    ...
