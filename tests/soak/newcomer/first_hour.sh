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

cat > make_prompts.py <<'PYTHON'
# make_prompts.py
import json
import random

random.seed(0)
with open("prompts.jsonl", "w") as file:
    for _ in range(600):
        digits = "".join(random.choices("0123456789", k=8))
        file.write(json.dumps({"prompt": f"{digits}>", "answer": "".join(sorted(digits))}) + "\n")
PYTHON
python make_prompts.py
cat > in_place.py <<'PYTHON'
# in_place.py
def in_place(rollouts, *, power: float = 1.0) -> list[float]:
    """Share of the answer's characters that are in the right place; a `power` above 1 favors nearly right answers."""
    scores = []
    for rollout in rollouts:
        hits = sum(given == right for given, right in zip(rollout.completion, rollout.answer))
        scores.append((hits / len(rollout.answer)) ** power)
    return scores
PYTHON
cat > run.yaml <<'YAML'
model: {path: runs/first/warm-start/model}
prompts: {name: jsonl, path: prompts.jsonl}
rewards: [{name: "./in_place.py:in_place"}, {name: exact-match, weight: 0.5}]
algorithm: {name: grpo, kl_coef: 0}
optimizer: {lr: 3.0e-4, warmup_episodes: 5, max_grad_norm: 1.0}
engine: {max_new_tokens: 10}
eval: {num_prompts: 100, every_episodes: 10}
train: {episodes: 40, prompts_per_episode: 64, samples_per_prompt: 8, train_batch_size: 256}
YAML
rlhf config check run.yaml
rlhf train run.yaml --dry-run
rlhf plan run.yaml
rlhf train run.yaml --output runs/second
python - <<'PYTHON'
import json
before = json.load(open("runs/second/evaluation-before.json"))["eval/in_place"]
after = [line["eval/in_place"] for line in map(json.loads, open("runs/second/metrics.jsonl")) if "eval/in_place" in line][-1]
assert after > before + 0.1, f"the page's own run has learned too little: {before} to {after}"
PYTHON
rlhf report runs/first runs/second --output comparison.html
test -s comparison.html
if rlhf config check run.yaml --set algorithm.kl_cof=0.1 2> wrong.txt; then exit 1; fi
grep "kl_coef" wrong.txt

rlhf train run.yaml --strategy ddp --num-processes 2 --set train.episodes=2
rlhf train run.yaml --transport ray --set train.episodes=2
rlhf train run.yaml --algorithm rloo --set train.episodes=2
rlhf train run.yaml --set model.lora.r=16 --set train.episodes=2
rlhf train --output runs/second --resume auto --set train.episodes=41
