"""Every installed algorithm keeps the contract of what feeds it."""

from __future__ import annotations

from rlhf_core.plugins.discovery import discover
from rlhf_core.plugins.selected import load_ref
from rlhf_testing.contracts import AlgorithmContract, DatasetAlgorithmContract, contracts_for

FED_BY = {name: load_ref(ref).component.feeds for name, ref in discover("algorithms").items()}
OTHERS = {feeds: {name: "fed otherwise" for name, by in FED_BY.items() if by != feeds} for feeds in FED_BY.values()}

IN_THEIR_OWN_TESTS = {"distill": "needs a teacher"}

globals().update(contracts_for(AlgorithmContract, skip=OTHERS["rollouts"] | IN_THEIR_OWN_TESTS))
STEPS = {"prompt": "1 + 1 + 1 =", "steps": ["1 + 1 is 2", "2 + 1 is 4"], "labels": [True, False]}
STEPPED = [{**STEPS, "prompt": f"{number} + 1 + 1 ="} for number in range(5)]

globals().update(
    contracts_for(
        DatasetAlgorithmContract,
        options={"process-reward-model": {"records": STEPPED}},
        skip=OTHERS["dataset"],
    )
)
