def episode_tokenizer(*, chat: bool) -> PreTrainedTokenizerBase:
    ...

class ScriptedEngine(FakeEngine):

    def __init__(self, tokenizer: PreTrainedTokenizerBase, replies: Sequence[str], *, seed: int) -> None:
        ...

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        ...

@dataclass(frozen=True, slots=True)
class PlayedEpisodes:
    played: Sequence[Played]
    sampled: Sequence[tuple[GenerationRequest, Completion]]

def play_episodes(environment: SelectedEnvironment, tokenizer: PreTrainedTokenizerBase, *, records: Sequence[Mapping[str, Any]]=(), replies: Sequence[str]=(), num_prompts: int=4, samples_per_prompt: int=2, seed: int=0, folder: Path | None=None) -> PlayedEpisodes:
    ...
