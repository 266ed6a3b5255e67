@dataclass(frozen=True, slots=True)
class Limits:
    timeout_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 * 2 ** 20
    max_processes: int = 16
    max_output_bytes: int = 2 ** 20
    max_file_bytes: int = 2 ** 24
    max_folder_bytes: int = 2 ** 26
    max_files: int = 1024

@lru_cache
def missing(mode: Mode='namespaces') -> str | None:
    ...

Mode = Literal['namespaces', 'landlock']

@dataclass(frozen=True, slots=True)
class ProgramResult:
    exit_code: int
    output: str
    error_output: str
    stopped_for: Literal['', 'time', 'processor', 'memory', 'output']

    @property
    def succeeded(self) -> bool:
        ...

def run_program(source: str, stdin: str='', limits: Limits | None=None, *, mode: Mode='namespaces') -> ProgramResult:
    ...

class SandboxError(RuntimeError):
    ...
