@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    turn: int = 0
    policy_version: int = 0

class Answering(Protocol):

    async def answer(self, call: Call) -> Answer:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    messages: tuple[ChatMessage, ...] = ()
    text: str | None = None
    tools: tuple[Tool, ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

class CallRefused(Exception):

    def __init__(self, status: int, code: str, message: str) -> None:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: str
    content: str = ''
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    call_ids: tuple[str, ...] = field(default=(), compare=False)

async def converse(policy: Policy, messages: Messages, tools: Sequence[Tool], use: UseTool) -> Status:
    ...

@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    base_url: str
    api_key: str = field(repr=False)
    model: str = 'policy'

class EndpointServer(Protocol):

    @property
    def base_url(self) -> str:
        ...

    def close(self) -> None:
        ...

class Environment(Protocol):

    async def run(self, task: Task, policy: Policy) -> Outcome:
        ...

class EpisodeTruncated(Exception):
    ...

FindKey = Callable[[str], Answering | None]

class Keys:

    def __init__(self) -> None:
        ...

    def add(self, owner: Answering, key: str | None=None) -> str:
        ...

    def remove(self, key: str) -> None:
        ...

    def find(self, given: str) -> Answering | None:
        ...

Messages = str | Sequence[Message] | None

@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    reward: float = 0.0
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    status: Status = 'done'

class Policy(Protocol):

    @property
    def remaining_turns(self) -> int:
        ...

    @property
    def remaining_tokens(self) -> int:
        ...

    async def turn(self, messages: Messages=None, tools: Sequence[Tool]=(), stop: Sequence[str]=()) -> Reply:
        ...

    def fork(self) -> Policy:
        ...

    async def endpoint(self) -> Endpoint:
        ...

@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    text: str
    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    turn: int
    policy_version: int

Status = Literal['done', 'truncated', 'failed']

@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    prompt: Prompt
    sample_id: int
    seed: int
    sample_seed: int

Tool = Mapping[str, Any]

class ToolFunction:

    def __init__(self, function: Callable[..., Any]) -> None:
        ...

    def bind(self, call: ToolCall) -> dict[str, Any] | str:
        ...

UseTool = Callable[[ToolCall], Awaitable[str]]
