@dataclass(frozen=True, slots=True)
class TrainerModels:
    tokenizer: PreTrainedTokenizerBase
    trained: dict[str, Trained]

    @property
    def policy(self) -> nn.Module:
        ...

def build_algorithm(resolved: ResolvedRun, tokenizer: PreTrainedTokenizerBase) -> Algorithm[Any, Any]:
    ...

def build_engine(resolved: ResolvedRun, model: nn.Module, tokenizer: PreTrainedTokenizerBase, strategy: Strategy) -> RolloutEngine:
    ...

def build_evaluator(resolved: ResolvedRun, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, scorer: RewardScorer, prompts: PromptStream, strategy: Ranks, eval_prompts: PromptStream | None=None) -> PolicyEvaluator:
    ...

def build_player(resolved: ResolvedRun, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, *, evaluates: SamplingParams | None=None) -> Player:
    ...

def build_reference_pass(resolved: ResolvedRun, algorithm: RolloutAlgorithm, strategy: Strategy, policy: nn.Module, critic: nn.Module | None) -> ReferencePass:
    ...

def build_run_prompts(resolved: ResolvedRun, tokenizer: PreTrainedTokenizerBase) -> PromptStream:
    ...

def build_scorer(resolved: ResolvedRun, device: torch.device, *, cache_folder: Path | None=None) -> RewardScorer:
    ...

def build_strategy(resolved: ResolvedRun) -> Strategy:
    ...

def build_trained_models(resolved: ResolvedRun, algorithm: Algorithm[Any, Any], strategy: Strategy, tokenizer: PreTrainedTokenizerBase) -> TrainerModels:
    ...

def model_dtype(resolved: ResolvedRun, strategy: Strategy) -> torch.dtype:
    ...
