class Reward(Protocol):

    def __call__(self, rollouts: Sequence[Rollout], /) -> Sequence[float] | Awaitable[Sequence[float]]:
        ...

@runtime_checkable
class PromptSource(Protocol):

    def __len__(self) -> int:
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        ...

class WeightReceiver(Protocol):

    def begin(self, version: int) -> None:
        ...

    def stage(self, version: int, chunk: Mapping[str, Tensor]) -> None:
        ...

    def commit(self, version: int, checksum: str | None=None) -> None:
        ...

@runtime_checkable
class RolloutEngine(Protocol):

    @property
    def policy_version(self) -> int:
        ...

    @property
    def context_tokens(self) -> int | None:
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        ...

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        ...

    def weights_updated(self, version: int) -> None:
        ...

    def receiver(self) -> WeightReceiver:
        ...

    def close(self) -> None:
        ...

class ExperienceMaker(Protocol):

    def make(self, prompts: Sequence[Prompt]) -> Iterator[RolloutGroup]:
        ...

class ExperienceChannel(Protocol):

    def episode(self, index: int) -> MadeEpisode:
        ...

    def published(self, version: int) -> None:
        ...

    def state_dict(self) -> dict[str, Any]:
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ...

    def close(self) -> None:
        ...

class WeightSync(Protocol):

    def publish(self, version: int) -> None:
        ...
