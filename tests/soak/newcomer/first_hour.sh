# docs/first-hour.md, step by step.
rlhf version
rlhf plugins list
rlhf train --output runs/first --set train.episodes=6
rlhf generate --model runs/first/model --prompt "31524987>"
rlhf samples runs/first
rlhf report runs/first
test -s runs/first/report.html

cat > prompts.jsonl <<'LINES'
{"prompt": "4312>", "answer": "1234"}
{"prompt": "9081>", "answer": "0189"}
{"prompt": "7756>", "answer": "5677"}
{"prompt": "2204>", "answer": "0224"}
LINES
cat > brevity.py <<'PYTHON'
def brevity(rollouts, *, target_tokens: int = 8) -> list[float]:
    """1 up to the target length, falling to 0 at twice the target."""
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    return [max(0.0, min(1.0, 2.0 - length / target_tokens)) for length in lengths]
PYTHON
cat > run.yaml <<'YAML'
model: {path: runs/first/model}
prompts: {name: jsonl, path: prompts.jsonl}
algorithm: {name: grpo}
rewards: [{name: exact-match}, {name: "./brevity.py:brevity", weight: 0.1}]
engine: {max_new_tokens: 8}
train: {episodes: 2, prompts_per_episode: 4, samples_per_prompt: 4, train_batch_size: 16}
YAML
rlhf config check run.yaml
rlhf train run.yaml --dry-run
rlhf train run.yaml --output runs/second
rlhf report runs/first runs/second --output comparison.html
test -s comparison.html
