class PromptEncoder:

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, text_as_chat: bool=False) -> None:
        ...

    def prompt(self, record: Record, position: int, name: str) -> Prompt:
        ...

    def lengths(self, records: Sequence[Record], names: Sequence[str]) -> list[int]:
        ...

class PromptStream:

    def __init__(self, source: PromptSource, tokenizer: PreTrainedTokenizerBase, *, seed: int, held_out: int=0, max_prompt_tokens: int | None=None, too_long: Literal['skip', 'error']='skip', text_as_chat: bool=False, may_be_empty: bool=False) -> None:
        ...

    def __len__(self) -> int:
        ...

    @property
    def skipped(self) -> int:
        ...

    @property
    def digest(self) -> str:
        ...

    def prompt(self, position: int) -> Prompt:
        ...

    def evaluation_prompts(self) -> list[Prompt]:
        ...

    def record(self, position: int) -> Record:
        ...

    def held_out_records(self) -> list[Record]:
        ...
