def derive_seed(seed: int, *what: str | int) -> int:
    ...

def fold(name: str) -> str:
    ...

def group_into_shards(tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    ...

def is_own(path: Path) -> bool:
    ...

def load_tree(path: Path | str, device: str='cpu') -> Any:
    ...

def parse_yaml(text: str, where: str) -> Any:
    ...

def permutation(n: int, seed: int, *what: str | int) -> list[int]:
    ...

def printable(text: str) -> str:
    ...

class PrintableFormatter(logging.Formatter):

    def format(self, record: logging.LogRecord) -> str:
        ...

def read_first_json(text: str, start: int=0) -> tuple[Any, int]:
    ...

def read_lines(path: Path) -> Iterator[Record]:
    ...

def redact_mapping(config: Mapping[str, Any]) -> dict[str, Any]:
    ...

def redact_text(text: str) -> str:
    ...

def save_tree(path: Path | str, tree: Any) -> None:
    ...

@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    max_connections: int = 256
    max_body_bytes: int = 8 * 2 ** 20
    max_bytes_in_flight: int = 16 * 2 ** 20
    idle_seconds: float = 30.0

def set_up_host_memory() -> None:
    ...

def state_dict_shards_of(model: nn.Module, max_shard_bytes: int, only: Callable[[str], bool] | None=None, gather: Callable[[str, Tensor], Tensor] | None=None) -> Iterator[dict[str, Tensor]]:
    ...

def stored_dtype(folder: Path) -> torch.dtype:
    ...

class UnreadableJson(ValueError):
    ...

def write_json(path: Path, value: Any) -> None:
    ...

def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None=None) -> None:
    ...
