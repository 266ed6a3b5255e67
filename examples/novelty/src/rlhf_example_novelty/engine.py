"""The engine `hot-start`: it samples the first token of an answer at the temperature set by the request."""

from collections.abc import Iterator, Sequence

import torch

from rlhf_core import Completion, GenerationRequest, SamplingParams
from rlhf_core.components import EngineContext
from rlhf_core.models import model_kind_of
from rlhf_core.protocols import RolloutEngine
from rlhf_forward import SampledTokens, greedy_sample, innermost, inverse_cdf_sample, uniforms
from rlhf_models import eos_token_ids

from .answer import Answer, begin
from .config import HotStartConfig


class HotStart:
    """A `RolloutEngine` with the module of its process. Without a cache, each step computes whole sequences."""

    def __init__(self, config: HotStartConfig, context: EngineContext) -> None:
        self.config, self.context = config, context
        self.request_options, self.columns = config.request_options, config.columns
        self.model = innermost(context.model)
        self.context_tokens: int | None = getattr(self.model.config, "max_position_embeddings", None)
        self.eos_token_ids = eos_token_ids(self.model, context.tokenizer)
        self.policy_version = 0

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Generate one batch after another, each until its longest answer ends."""
        answers = [begin(request, sampling, self.context_tokens) for request in requests]
        for start in range(0, len(answers), self.config.max_batch_size):
            batch = left = answers[start : start + self.config.max_batch_size]
            while left:
                drawn = self.drawn(left, sampling)
                support = [[]] * len(left) if drawn.support_ids is None else drawn.support_ids.tolist()
                tokens = zip(drawn.token_ids.tolist(), drawn.log_probs.tolist(), support, strict=True)
                for answer, token in zip(left, tokens, strict=True):
                    answer.extend(*token, self.eos_token_ids, self.context.tokenizer)
                left = [answer for answer in left if answer.finish is None]
            yield from (answer.completion(self.policy_version) for answer in batch)

    @torch.no_grad()
    def drawn(self, answers: Sequence[Answer], sampling: SamplingParams) -> SampledTokens:
        """Sample the next token of each answer."""
        device, dtype = self.context.device, self.context.compute_dtype
        rows = [[*answer.request.prompt_ids, *answer.ids] for answer in answers]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], device=device)
        given = [answer.request.inputs for answer in answers]  # columns of the prompts, for the kind of model
        columns = {name: torch.stack([each[name] for each in given]).to(device) for name in given[0]}
        inputs = model_kind_of(self.model).inputs(ids, mask, columns)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            output = self.context.model(input_ids=ids, attention_mask=mask.long(), use_cache=False, **inputs)
        logits = output.logits[:, -1]
        if sampling.greedy:
            return greedy_sample(logits)
        noise = uniforms(self.context.seed, *torch.tensor([answer.noise_counter for answer in answers]).T).to(device)
        temperatures = torch.tensor([[answer.temperature] for answer in answers], device=device)
        return inverse_cdf_sample(logits, noise, temperatures, sampling.top_k, sampling.top_p)

    def weights_updated(self, version: int) -> None:
        self.policy_version = version

    def close(self) -> None:
        """Do nothing, since it does not hold resources."""


def build(config: HotStartConfig, context: EngineContext) -> RolloutEngine:
    """Create the engine of one process."""
    return HotStart(config, context)
