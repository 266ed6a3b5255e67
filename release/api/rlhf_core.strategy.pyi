ReduceOp = Literal['sum', 'max', 'min']

class Trained(NamedTuple):
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None

class StateBytes(NamedTuple):
    weights: float = 4.0
    gradients: float = 4.0
    optimizer: float = 8.0
    reference: float = 4.0

class Strategy(ABC):

    @property
    @abstractmethod
    def rank(self) -> int:
        ...

    @property
    @abstractmethod
    def world_size(self) -> int:
        ...

    @property
    @abstractmethod
    def device(self) -> torch.device:
        ...

    @property
    def is_main(self) -> bool:
        ...

    @property
    @abstractmethod
    def shards_parameters(self) -> bool:
        ...

    @property
    @abstractmethod
    def parameter_dtype(self) -> torch.dtype:
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

    def naming_lost_peers(self) -> AbstractContextManager[Any]:
        ...

    def model_init_context(self) -> AbstractContextManager[Any]:
        ...

    def state_bytes(self, num_processes: int, dtype: torch.dtype) -> StateBytes:
        ...

    @abstractmethod
    def make_optimizer(self, params: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float]=(0.9, 0.999), eps: float=1e-08, weight_decay: float=0.0) -> Optimizer:
        ...

    @abstractmethod
    def prepare(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None=None, *, max_grad_norm: float | None=None) -> Trained:
        ...

    def prepare_inference(self, model: nn.Module) -> nn.Module:
        ...

    def accumulate(self, model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        ...

    @abstractmethod
    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        ...

    @property
    @abstractmethod
    def gradient_average_factor(self) -> int:
        ...

    @abstractmethod
    def step(self, trained: Trained) -> float:
        ...

    def drop_gradients(self, trained: Trained) -> None:
        ...

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp='sum') -> Tensor:
        ...

    @abstractmethod
    def all_gather_objects(self, value: Any) -> list[Any]:
        ...

    def broadcast_object(self, value: Any) -> Any:
        ...

    def barrier(self) -> None:
        ...

    def run_on_main(self, action: Callable[[], None]) -> None:
        ...

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        ...

    @abstractmethod
    def state_dict_shards(self, model: nn.Module, max_shard_bytes: int, only: Callable[[str], bool] | None=None) -> Iterator[dict[str, Tensor]]:
        ...

    @abstractmethod
    def save_model(self, model: nn.Module, path: Path) -> None:
        ...

    @abstractmethod
    def load_model(self, model: nn.Module, path: Path) -> None:
        ...

    @abstractmethod
    def save_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        ...

    @abstractmethod
    def load_optimizer(self, optimizer: Optimizer, path: Path) -> None:
        ...

    @abstractmethod
    def save_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        ...

    @abstractmethod
    def load_lr_scheduler(self, scheduler: LRScheduler, path: Path) -> None:
        ...

Models = Mapping[str, 'nn.Module']
