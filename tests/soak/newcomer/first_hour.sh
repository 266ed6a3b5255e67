# docs/first-hour.md, step by step; tests/architecture/test_code_blocks.py asks that each of its commands is here.
rlhf version
rlhf plugins list

rlhf train --output runs/first --set train.episodes=12 > first.txt &
until test -s runs/first/metrics.jsonl; do kill -0 $!; sleep 1; done
rlhf samples runs/first
rlhf control runs/first pause
rlhf control runs/first resume
DASHBOARD_KEY=a-key rlhf dashboard --port 0 --api-key-env DASHBOARD_KEY > dashboard.txt &
wait %1
until test -s dashboard.txt; do kill -0 %2; sleep 1; done
address="$(grep -o 'http://[0-9.:]*/' dashboard.txt)"
python - "$address" <<'PYTHON'
import sys, urllib.error, urllib.request
runs = urllib.request.Request(sys.argv[1] + "api/runs", headers={"Authorization": "Bearer a-key"})
assert b'"first"' in urllib.request.urlopen(runs, timeout=60).read()
try:
    urllib.request.urlopen(sys.argv[1] + "api/runs", timeout=60)
except urllib.error.HTTPError as refused:
    assert refused.code == 401
else:
    raise SystemExit("it answered without the key")
PYTHON
kill %2
wait %2
grep stopped dashboard.txt

rlhf generate --model runs/first/model --prompt "31524987>"
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
rlhf plan run.yaml
rlhf train run.yaml --output runs/second
rlhf report runs/first runs/second --output comparison.html
test -s comparison.html
if rlhf config check run.yaml --set algorithm.kl_cof=0.1 2> wrong.txt; then exit 1; fi
grep "kl_coef" wrong.txt

rlhf train run.yaml --strategy ddp --num-processes 2
rlhf train run.yaml --transport ray
rlhf train run.yaml --algorithm rloo
rlhf train run.yaml --set model.lora.r=16
rlhf train --output runs/second --resume auto --set train.episodes=3
