def batches_of(loader: Iterable[B], num_epochs: int, num_steps: int, *, where: str) -> Iterator[B]:
    ...

class BatchReader:

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, decoder: Any, *, needs_mask: bool) -> None:
        ...

    def read(self, batch: Any, first_position: int, where: str) -> list[Prompt]:
        ...

class CycledLoader(Generic[B]):

    def __init__(self, loader: Iterable[B], *, where: str, skip: int=0) -> None:
        ...

class NeuralReward:

    def __init__(self, model: nn.Module, device: torch.device, *, offload: bool, where: str) -> None:
        ...

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        ...

    def release(self) -> None:
        ...

def sampling_params(options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> SamplingParams:
    ...

def seed_reward(reward: object, device: torch.device, *, offload: bool, seed: int, where: str) -> RewardSpec:
    ...

def set_eos(model: nn.Module, eos_token_id: int | Sequence[int] | None) -> None:
    ...

def strategy_by_name(name: str, options: Mapping[str, Any] | None=None, *, device: str='auto') -> Strategy:
    ...
