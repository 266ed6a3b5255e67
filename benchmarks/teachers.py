"""Teachers of `distill` compared with plain variants: held-out score after a number of samples, as JSON lines.

    python benchmarks/teachers.py RESULTS.json [--arms ARM …] [--seeds SEED …]

The task is to sort six digits. The warm start saw problems of two kinds, `31524>` and, with the answer in front,
`12345,31524>`, so that it can use an answer in its prompt but is not good at sorting. Arms of a seed start from it.

rewards       GRPO, which learns from exact match alone (the plain variant of the next two)
self-current  distill, the teacher is the current policy with the answer in its prompt
self-start    distill, the teacher is the warm start with the answer in its prompt
same-tokens   distill from a trained teacher with the policy's tokenizer, sampled tokens (the plain variant of the next)
other-tokens  distill from a teacher trained on the same problems that has other ids, and tokens for pairs of digits
one-teacher   distill, half of the problems are in descending order, but the only teacher sorts in ascending order
two-teachers  distill, with a teacher for each order, chosen by a key of the record
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGITS, SIZE, HELD_OUT = 6, 20_000, 256
EPISODES, PER_EPISODE, EVERY = 30, 256, 5
ARMS = ("rewards", "self-current", "self-start", "same-tokens", "other-tokens", "one-teacher", "two-teachers")


def problem(draw: random.Random, kind: str) -> dict[str, Any]:
    """One record. kind: up, down (descending, marked by a comma in front) or shown (the answer is in front)."""
    digits = "".join(draw.choices("0123456789", k=DIGITS))
    answer = "".join(sorted(digits, reverse=kind == "down"))
    front = {"up": "", "down": ",", "shown": f"{answer},"}[kind]
    return {"prompt": f"{front}{digits}>", "answer": answer, "completion": answer, "kind": kind}


def write_problems(path: Path, kinds: tuple[str, ...], seed: int, number: int = SIZE) -> dict[str, Any]:
    """Write a file of problems, and return the section that reads it."""
    draw = random.Random(seed)
    lines = [json.dumps(problem(draw, kinds[index % len(kinds)])) for index in range(number)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"name": "jsonl", "path": str(path)}


def pair_model(folder: Path, seed: int) -> str:
    """Write a model without training, whose tokenizer has one token for each pair of digits."""
    import torch
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    import rlhf_models

    builtin = Path(rlhf_models.__file__).parent / "builtin_models" / "tiny-digits"
    known = AutoTokenizer.from_pretrained(builtin)
    names = ["<eos>", "<pad>", ">", ",", *"9876543210", *(a + b for a in "0123456789" for b in "0123456789")]
    merges = [(a, b) for a in "0123456789" for b in "0123456789"]
    tokenizer = Tokenizer(BPE({name: index for index, name in enumerate(names)}, merges))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    config = AutoConfig.from_pretrained(builtin)
    assert len(known) < len(names)
    config.vocab_size, config.eos_token_id, config.pad_token_id, config.bos_token_id = len(names), 0, 1, None
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


class Study:
    """The runs of one seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder
        self._models: dict[str, str] = {}

    def supervised(self, name: str, kinds: tuple[str, ...], episodes: int, path: str | None = None) -> str:
        """Train a model on right answers, once. Returns its folder."""
        from rlhf_core import train
        from rlhf_start.quickstart import stage as quickstart_stage

        if name not in self._models:
            run = quickstart_stage("warm-start")
            run["model"]["path"] = path or run["model"]["path"]
            run["prompts"] = write_problems(self._folder / f"{name}.jsonl", kinds, seed=1000 + self._seed)
            run["train"] |= {"episodes": episodes, "seed": self._seed}
            train(run, output=self._folder / name)
            self._models[name] = str(self._folder / name / "model")
        return self._models[name]

    def algorithm(self, arm: str) -> dict[str, Any]:
        """Options of the arm."""
        if arm == "rewards":
            return {"name": "grpo", "kl_coef": 0.0}
        if arm.startswith("self"):
            which = arm.removeprefix("self-")
            return {"name": "distill", "top_k": 8, "teacher": {"policy": which, "context": "{answer},{prompt}"}}
        up = {"path": self.supervised("teacher", ("up",), 200)}
        if arm == "same-tokens":
            return {"name": "distill", "teacher": up}
        if arm == "other-tokens":
            start = pair_model(self._folder / "pairs", self._seed)
            own = self.supervised("other-teacher", ("up",), 200, start)
            return {"name": "distill", "teacher": {"path": own, "tokenizer": own}}
        if arm == "one-teacher":
            return {"name": "distill", "top_k": 8, "teacher": up}
        down = {"path": self.supervised("down-teacher", ("down",), 200)}
        return {"name": "distill", "top_k": 8, "teachers": {"up": up, "down": down}, "teacher_key": "kind"}

    def run(self, arm: str) -> Mapping[str, Any]:
        """Run one arm."""
        from rlhf_core import train
        from rlhf_start.quickstart import stage as quickstart_stage

        kinds = ("up", "down") if arm.endswith(("teacher", "teachers")) else ("up",)
        start = self.supervised("mixed" if "down" in kinds else "warm", (*kinds, "shown"), 40)
        run = quickstart_stage("critic-free" if arm == "rewards" else "distill")
        run["model"]["path"] = start
        run["prompts"] = write_problems(self._folder / f"{arm}.jsonl", kinds, seed=self._seed)
        held_out = write_problems(self._folder / f"held-out-{len(kinds)}.jsonl", kinds, seed=-1, number=HELD_OUT)
        run["eval"] = {"every_episodes": EVERY, "num_prompts": HELD_OUT, "batch_size": HELD_OUT, "prompts": held_out}
        run["algorithm"] = self.algorithm(arm)
        samples = 8 if arm == "rewards" else 1
        of_train = {"prompts_per_episode": PER_EPISODE // samples, "samples_per_prompt": samples}
        run["train"] |= {"episodes": EPISODES, **of_train, "train_batch_size": 128, "seed": self._seed}
        run["checkpoint"] = {"every_episodes": None}
        run["logging"] = {"tensorboard": False, "samples": "none"}
        result = train(run, output=self._folder / arm)
        assert result is not None
        scores = {
            (1 + line["episode"]) * PER_EPISODE: round(line["eval/score"], 3)
            for line in result.metrics
            if "eval/score" in line
        }
        return {"arm": arm, "seed": self._seed, "scores": scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    done: list[Mapping[str, Any]] = json.loads(options.results.read_text()) if options.results.exists() else []
    known = {(each["arm"], each["seed"]) for each in done}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            study = Study(seed, Path(folder))
            for arm in options.arms:
                if (arm, seed) not in known:
                    done.append(study.run(arm))
                    options.results.write_text(json.dumps(done, indent=1))
                    print(json.dumps(done[-1]), flush=True)


if __name__ == "__main__":
    main()
