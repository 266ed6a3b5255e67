class AllReduce(Protocol):

    def __call__(self, tensor: Tensor, op: Literal['sum', 'max']='sum', /) -> Tensor:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeScalars:
    sample_ids: Tensor
    group_ids: Tensor
    scores: Tensor
    lengths: Tensor
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    branches: Tensor | None = None
    kl: Tensor | None = None
    totals: Tensor | None = None

    @property
    def row_sample_ids(self) -> Tensor | None:
        ...

    @property
    def num_samples(self) -> int:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    scalars: EpisodeScalars
    rows: Tensor
    all_reduce: AllReduce

    def here(self, values: Tensor) -> Tensor:
        ...

    def of_all(self, values: Tensor) -> Tensor:
        ...

def whole_of(rows: Experience) -> Whole:
    ...

def alone(tensor: Tensor, op: Literal['sum', 'max']='sum', /) -> Tensor:
    ...
