# docs/hooks.md: a run that ends at its goal, a hook and a logger by name, a run that is stopped, and plain model folders.
rlhf train --output runs/goal --set hooks.early-stop.metric=reward/mean --set hooks.early-stop.above=0.5
grep '"status": "done"' runs/goal/summary.json
grep '"guard": "early-stop"' runs/goal/summary.json
test -s runs/goal/model/config.json
rlhf train --output runs/goal --resume auto > again.txt 2>&1
grep "already done: early-stop" again.txt
rlhf generate --model runs/goal/model --prompt "31524987>"

# A hook and a reward of one's own, with options, and a trace of the second episode.
cat > counter.py <<'PYTHON'
class Counter:
    """Writes how many episodes there were, over all sessions of the run."""

    def __init__(self, *, path: str = "count.txt"):
        self.path, self.seen = path, 0

    def rlhf_decide(self, moment):
        self.seen += moment.at == "episode"
        with open(self.path, "w") as file:
            file.write(str(self.seen))

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
PYTHON
cat > run.yaml <<'YAML'
model: {path: runs/goal/model, lora: {r: 4}}
prompts: {name: sort-digits, num_digits: 4, size: 500, max_prompt_tokens: 16}
algorithm: {name: grpo}
rewards: [exact-match, {name: length, weight: 0.1}]
engine: {max_new_tokens: 8}
train: {episodes: 2, prompts_per_episode: 4, samples_per_prompt: 4, train_batch_size: 16}
hooks:
  ./counter.py:Counter: {path: count.txt}
  profiler: {episodes: [1]}
YAML
rlhf config check run.yaml
rlhf train run.yaml --output runs/hooked
rlhf train run.yaml --output runs/hooked --resume auto --set train.episodes=3
test "$(cat count.txt)" = 3
head -1 runs/hooked/metrics.jsonl | grep "reward/mean"
grep -q "rlhf/rollout" runs/hooked/profile/episode-1.json
if rlhf train run.yaml --output runs/wrong --set hooks.early-stp.above=1 2> wrong.txt; then exit 1; fi
grep 'did you mean "early-stop"' wrong.txt
if rlhf train run.yaml --output runs/wrong --set logging.mlflow=true 2> wrong.txt; then exit 1; fi
grep "rlhf-logger-mlflow\[mlflow\]" wrong.txt

# A run that is stopped has its model; any checkpoint makes one.
rlhf train run.yaml --output runs/stopped --set train.episodes=100000 --set checkpoint.every_episodes=1 > stopped.txt 2>&1 &
until test -s runs/stopped/metrics.jsonl; do kill -0 $!; sleep 1; done
rlhf control runs/stopped stop
wait $! || test $? = 130
grep "stopped after episode" stopped.txt
if grep "^error:" stopped.txt; then exit 1; fi
test -s runs/stopped/model/config.json
rlhf export runs/stopped --to merged --merge-lora --dtype bfloat16
rlhf export runs/stopped --to adapter
test -s adapter/adapter_config.json
rlhf generate --model merged --prompt "4312>"
python -c "from transformers import AutoModelForCausalLM; print(AutoModelForCausalLM.from_pretrained('merged').dtype)"

# What is shown.
printf '{"prompt": "4312>", "answer": "1234"}\n{"prompt": "9081>", "answer": "0189"}\n' > prompts.jsonl
rlhf eval --model merged --prompts prompts.jsonl --reward exact-match --reward length:0.1 > scores.txt
grep "weighted_score" scores.txt
rlhf samples runs/hooked --show best --number 1 | grep "weighted score"
rlhf plugins show clip | grep clip_eps_high
rlhf plugins show early-stop | grep patience
rlhf config schema | grep '"early-stop"'
_RLHF_COMPLETE=bash_source rlhf | grep _RLHF_COMPLETE
