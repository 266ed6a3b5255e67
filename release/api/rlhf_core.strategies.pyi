def autocast_for(compute_dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    ...

def check_offload(device: torch.device, asked: Mapping[str, bool]) -> None:
    ...

def diverged(norm: float, where: str='training') -> DivergenceError:
    ...

def grouped_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    ...

class GroupStrategy(Strategy):

    def __init__(self, group: ProcessGroup) -> None:
        ...

    @property
    def rank(self) -> int:
        ...

    @property
    def world_size(self) -> int:
        ...

    @property
    def device(self) -> torch.device:
        ...

    @property
    def shards_parameters(self) -> bool:
        ...

    @property
    def parameter_dtype(self) -> torch.dtype:
        ...

    @property
    def gradient_average_factor(self) -> int:
        ...

    def naming_lost_peers(self) -> AbstractContextManager[Any]:
        ...

    def all_reduce(self, tensor: Tensor, op: ReduceOp='sum') -> Tensor:
        ...

    def all_gather_objects(self, value: Any) -> list[Any]:
        ...

    def make_optimizer(self, params: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float]=(0.9, 0.999), eps: float=1e-08, weight_decay: float=0.0) -> Optimizer:
        ...

    def save_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        ...

    def load_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        ...

class LossScale:

    def __init__(self, *, enabled: bool) -> None:
        ...

    def applied_to(self, loss: Tensor) -> Tensor:
        ...

    def found_overflow(self) -> None:
        ...

    def found_finite(self) -> None:
        ...

def make_adamw(params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Optimizer:
    ...

@dataclass(eq=False)
class Prepared:
    trained: Trained
    names: list[list[str]]
    parameters: dict[str, nn.Parameter]
    max_grad_norm: float | None
    loss_scale: LossScale = field(default_factory=lambda: LossScale(enabled=False))

def resolve_device(name: str, local_rank: int=0) -> torch.device:
    ...

def resolve_precision(precision: Precision, device: torch.device, on_cpu: ResolvedPrecision) -> ResolvedPrecision:
    ...

ResolvedPrecision = Literal['fp32', 'bf16', 'fp16']

class StrategyBase(GroupStrategy):

    def __init__(self, *, device: torch.device, precision: ResolvedPrecision, timeout_seconds: float) -> None:
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        ...

    @property
    def compute_dtype(self) -> torch.dtype | None:
        ...

    def setup(self) -> None:
        ...

    def teardown(self) -> None:
        ...

    def prepare(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None=None, *, max_grad_norm: float | None=None) -> Trained:
        ...

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        ...

    def step(self, trained: Trained) -> float:
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        ...

    def state_dict_shards(self, model: nn.Module, max_shard_bytes: int, only: Callable[[str], bool] | None=None) -> Iterator[dict[str, Tensor]]:
        ...

    def save_model(self, model: nn.Module, path: Path) -> None:
        ...

    def load_model(self, model: nn.Module, path: Path) -> None:
        ...

    def save_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        ...

    def load_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        ...

    def prepared_of(self, optimizer: Optimizer) -> Prepared:
        ...

def torch_dtype(precision: ResolvedPrecision) -> torch.dtype:
    ...

def torch_step(optimizer: Optimizer, scheduler: LRScheduler | None, max_grad_norm: float | None, loss_scale: LossScale, whole: Callable[[Tensor], Tensor]=lambda tensor: tensor) -> float:
    ...
