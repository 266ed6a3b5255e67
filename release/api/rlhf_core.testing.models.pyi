CHARACTERS = '0123456789>,'

POLICY_PATH = 'builtin:tiny-digits'

def tiny_tokenizer(characters: str=CHARACTERS) -> PreTrainedTokenizerBase:
    ...

def tiny_model(*, seed: int=0, hidden_size: int=16, num_layers: int=2, characters: str=CHARACTERS) -> PreTrainedModel:
    ...

def tiny_classifier() -> LlamaForSequenceClassification:
    ...

def save_tiny_model(folder: Path, *, seed: int=0, with_tokenizer: bool=True) -> Path:
    ...
