Answer = Callable[[GenerationRequest, int], Sequence[int]]

class FakeEngine:

    def __init__(self, *, seed: int=0, vocabulary: Sequence[int]=range(4, 14), answer: Answer | None=None) -> None:
        ...

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

class FakeReceiver:

    def __init__(self, engine: FakeEngine) -> None:
        ...

    def begin(self, version: int) -> None:
        ...

    def stage(self, version: int, chunk: Mapping[str, Tensor]) -> None:
        ...

    def commit(self, version: int, checksum: str | None=None) -> None:
        ...
