"""Cost of moving a run's samples from many makers to many trainer ranks, with engines that only sleep.

    python benchmarks/coordinator.py [--makers 64 --group-kb 64 --ranks 8 --episodes 10 --groups 256 --kill host]

The coordinator, serialization and loads are those of `--transport ray`. Makers are coroutines and ranks are threads,
each in at most four processes. Without arguments a short grid runs (at most five minutes), and the last line is one
JSON object. `by value` is the previous way to send samples: packed into the message, through the coordinator, to every
rank.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import os
import pickle
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import psutil
import ray
import torch

from rlhf_core.batching import balanced
from rlhf_core.rollout import SamplesLost
from rlhf_core.types import BufferItem, PhaseTimes, RolloutGroup
from rlhf_ray.config import RayConfig
from rlhf_ray.coordinator_actor import Coordinator
from rlhf_ray.groups import group_from_tree, group_to_tree
from rlhf_ray.messages import RolloutWork, RunOver
from rlhf_ray.sample_store import StoredEpisode, StoredGroup, store_groups

PROCESSES = 4  # maximum number of processes of makers, and of ranks
SAMPLES = 16  # answers per prompt
WAIT = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Settings of one run of the simulation."""

    makers: int = 8
    group_kb: int = 64
    ranks: int = 1
    groups: int = 256
    """Prompts per episode."""
    episodes: int = 6
    max_staleness: int = 1
    by_value: bool = False
    kill: str = "none"
    """`maker` ends one coroutine, `host` kills a process of makers. Either is replaced."""
    kill_every: float = 1.0  # seconds
    lengths: str = "constant"
    """Distribution of answer lengths: `constant`, `uniform` or `geometric` (mean a sixth of the limit)."""
    step_ms: float = 0.0
    """Milliseconds per decoding step of at most 1,024. A prompt takes as long as its longest answer."""


def settings(case: Case) -> RayConfig:
    """Settings of the run."""
    lease = math.ceil(case.groups / case.makers)
    staleness = case.max_staleness
    return RayConfig(prompts_per_lease=lease, max_staleness=staleness, lease_seconds=600, heartbeat_seconds=600)


class Makers:
    """Several makers as coroutines of one process."""

    def __init__(self, case: Case, coordinator: Any, names: Sequence[str]) -> None:
        self._case, self._coordinator, self._names = case, coordinator, names
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._random = random.Random(names[0])
        self._tensors = _tensors(case.group_kb)

    async def run(self) -> None:
        """Make the groups that the coordinator requests until the run is over."""
        for name in self._names:
            self.start(name)
        while pending := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(pending, timeout=1.0)
        for task in self._tasks.values():
            if not task.cancelled():
                task.result()

    def start(self, name: str) -> None:
        """Start a maker of this name."""
        self._tasks[name] = asyncio.get_running_loop().create_task(self._make(name))

    async def replace(self, name: str, by: str) -> None:
        """End a maker during its work. Another maker replaces it."""
        self._tasks.pop(name).cancel()
        self.start(by)

    async def _make(self, name: str) -> None:
        coordinator = self._coordinator
        await coordinator.register.remote(name, os.getpid(), "node", 0)
        while not isinstance(work := await coordinator.next_work.remote(name, 10.0), RunOver):
            if not isinstance(work, RolloutWork):
                continue
            await asyncio.sleep(max(self._seconds() for _ in work.positions))
            groups = [_group(self._tensors, position, work.version) for position in work.positions]
            stored = (
                [_by_value(g, name) for g in groups] if self._case.by_value else store_groups(groups, name, texts=False)
            )
            await coordinator.submit.remote(name, work.era, stored, PhaseTimes())

    def _seconds(self) -> float:
        """Duration of the longest of a prompt's answers."""
        limit, draw, kind = 1024, self._random, self._case.lengths
        if kind == "constant":
            return limit * self._case.step_ms / 1000
        drawn = [draw.uniform(1, limit) if kind == "uniform" else draw.expovariate(6 / limit) for _ in range(SAMPLES)]
        return min(limit, max(drawn)) * self._case.step_ms / 1000


class Meeting:
    """Actor through which the processes of ranks exchange values, like a process group."""

    def __init__(self, world: int) -> None:
        self._world, self._full = world, asyncio.Condition()
        self._values: dict[int, dict[int, Any]] = {}

    async def exchange(self, number: int, values: Mapping[int, Any]) -> dict[int, Any]:
        """Every rank's value of the exchange of this number."""
        async with self._full:
            there = self._values.setdefault(number, {})
            there.update(values)
            if len(there) == self._world:
                self._full.notify_all()
            await asyncio.wait_for(self._full.wait_for(lambda: len(there) == self._world), WAIT)
            self._values.pop(number - 2, None)
            return there


class Ranks:
    """Several ranks as threads of one process, which exchange values together."""

    def __init__(self, case: Case, coordinator: Any, meeting: Any, numbers: Sequence[int]) -> None:
        self._ranks = [Rank(case, coordinator, self, number) for number in numbers]
        self._meeting, self._exchanges = meeting, 0
        self._mine: dict[int, Any] = {}  # by rank
        self._all = self._mine
        self._barrier = threading.Barrier(len(numbers), self._exchange, WAIT)

    def run(self) -> list[int]:
        """Run all ranks and return the ids of the samples they loaded."""
        with ThreadPoolExecutor(len(self._ranks)) as pool:
            return [sample for seen in pool.map(Rank.run, self._ranks) for sample in seen]

    def gather(self, rank: int, value: Any) -> dict[int, Any]:
        """Gather every rank's value. All ranks must call it."""
        self._mine[rank] = value
        self._barrier.wait()
        return self._all

    def _exchange(self) -> None:
        self._exchanges += 1
        self._all = ray.get(self._meeting.exchange.remote(self._exchanges, self._mine), timeout=WAIT)


class Rank:
    """A trainer rank without a model, which is also its own `Strategy`, as far as loading needs one."""

    def __init__(self, case: Case, coordinator: Any, host: Ranks, number: int) -> None:
        self.number, self._case, self._coordinator, self._host = number, case, coordinator, host

    def all_gather_objects(self, value: Any) -> list[Any]:
        if self._case.ranks == 1:
            return [value]
        values = self._host.gather(self.number, value)
        return [values[rank] for rank in range(self._case.ranks)]

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return torch.from_numpy(np.stack(self.all_gather_objects(tensor.numpy()))).amax(0)

    def run_on_main(self, work: Callable[[], None]) -> None:
        if self.number == 0:
            work()
        self.all_gather_objects(None)

    def run(self) -> list[int]:
        """Load the episodes and publish a version after each. Return the sample ids."""
        seen: list[int] = []
        for episode in range(self._case.episodes):
            seen += self._load(episode)
            self.all_gather_objects(None)
            if self.number == 0:
                ray.get(self._coordinator.publish.remote(episode + 1), timeout=WAIT)
        return seen

    def _load(self, episode: int) -> list[int]:
        while True:
            taken = ray.get(self._coordinator.take.remote(episode, WAIT), timeout=2 * WAIT)
            if self._case.by_value:
                trees = (pickle.loads(group.summaries) for group in taken.groups)  # noqa: S301
                items = [item for tree in trees for item in group_from_tree(tree).items]
                return [items[row].sample_id for row in self._share([item.num_tokens for item in items])]

            def give_back(positions: list[int], episode: int = episode) -> None:
                ray.get(self._coordinator.give_back.remote(episode, positions), timeout=WAIT)

            data = StoredEpisode(taken.groups, self, give_back=give_back, timeout_seconds=WAIT)  # type: ignore[arg-type]
            try:
                items, _ = data.load(self._share([row.num_tokens for row in data.rows]), [])
                return [item.sample_id for item in items]
            except SamplesLost:
                continue

    def _share(self, lengths: Sequence[int]) -> list[int]:
        return balanced(lengths, self._case.ranks)[self.number]


def _tensors(group_kb: int) -> list[dict[str, torch.Tensor]]:
    """Tensors of each answer."""
    tokens = max(1, group_kb * 1024 // SAMPLES // 17)  # bytes of a token: id 8, mask 1, two log-probs 8
    floats = {name: torch.zeros(tokens) for name in ("action_log_probs", "reference_log_probs")}
    mask = torch.ones(tokens, dtype=torch.bool)
    one = {"prompt_ids": torch.arange(16), "response_ids": torch.arange(tokens), "action_mask": mask, **floats}
    return [{name: tensor.clone() for name, tensor in one.items()} for _ in range(SAMPLES)]


def _group(tensors: Sequence[Mapping[str, torch.Tensor]], position: int, version: int) -> RolloutGroup:
    items = [
        BufferItem(
            sample_id=position * SAMPLES + k,
            group_id=position,
            policy_version=version,
            rewards={"accuracy": 1.0, "format": 0.5},
            **each,
        )
        for k, each in enumerate(tensors)
    ]
    return RolloutGroup(position=position, rollouts=(), items=tuple(items))


def _by_value(group: RolloutGroup, owner: str) -> StoredGroup:
    """Pack the whole group into the message, with arrays instead of tensors."""
    body = io.BytesIO()
    pickler = pickle.Pickler(body, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {torch.Tensor: lambda tensor: (torch.from_numpy, (tensor.numpy(),))}
    pickler.dump(group_to_tree(group))
    (bare,) = store_groups([RolloutGroup(position=group.position, rollouts=(), items=())], owner, texts=False)
    return replace(bare, is_empty=False, summaries=body.getvalue(), token_bytes=body.tell())


def simulate(case: Case) -> dict[str, Any]:
    """Run the case on the running local Ray, and check that each sample was loaded once."""
    remote, many = ray.remote(num_cpus=0), ray.remote(num_cpus=0, max_concurrency=1000)
    sizes = {"num_makers": case.makers, "num_episodes": case.episodes, "prompts_per_episode": case.groups}
    coordinator = remote(Coordinator).remote(settings(case), **sizes)
    meeting = many(Meeting).remote(case.ranks)
    names = [f"maker-{number}" for number in range(case.makers)]
    hosts = [many(Makers).remote(case, coordinator, dealt) for dealt in _dealt(names)]
    ranks = [remote(Ranks).remote(case, coordinator, meeting, numbers) for numbers in _dealt(range(case.ranks))]
    ray.get([host.__ray_ready__.remote() for host in [*hosts, *ranks, coordinator, meeting]], timeout=WAIT)
    ray.get(coordinator.publish.remote(0), timeout=WAIT)
    pid = ray.get(coordinator.__ray_call__.remote(lambda _: os.getpid()), timeout=WAIT)
    work = [host.run.remote() for host in hosts]
    ended = threading.Event()
    killer = threading.Thread(target=_kill, args=(case, coordinator, hosts, work, ended), daemon=True)
    started, before = time.perf_counter(), _cpu_seconds(pid)
    loads = [each.run.remote() for each in ranks]
    killer.start()
    memory = [_resident(pid)]
    while ray.wait(loads, num_returns=len(loads), timeout=0.5)[1]:
        memory.append(_resident(pid))
        if time.perf_counter() - started > case.episodes * WAIT:
            raise TimeoutError(f"{case} did not end: {ray.get(coordinator.overview.remote(0.0)).progress}")
    counts = Counter(sample for seen in ray.get(loads) for sample in seen)
    seconds = time.perf_counter() - started
    busy = _cpu_seconds(pid) - before
    ended.set()
    killer.join(WAIT)
    ray.get(coordinator.finish.remote(), timeout=WAIT)
    expected = range(case.episodes * case.groups * SAMPLES)
    for actor in [*hosts, *ranks, coordinator, meeting]:
        ray.kill(actor)
    return {
        **asdict(case),
        "seconds": round(seconds, 2),
        "groups_per_second": round(case.episodes * case.groups / seconds, 1),
        "coordinator_ms_per_group": round(1000 * busy / (case.episodes * case.groups), 3),
        "lost": len(set(expected) - set(counts)),
        "doubled": sum(count - 1 for count in counts.values()) + len(set(counts) - set(expected)),
        "coordinator_mb": [round(memory[quarter * (len(memory) - 1) // 4] / 1e6) for quarter in range(1, 5)],
    }


def _dealt(values: Sequence[Any]) -> list[list[Any]]:
    return [list(values[start::PROCESSES]) for start in range(min(PROCESSES, len(values)))]


def _kill(case: Case, coordinator: Any, hosts: list[Any], work: list[Any], ended: threading.Event) -> None:
    """Kill makers during the run and replace them, as the driver of a run does."""
    names, turn = _dealt([f"maker-{i}" for i in range(case.makers)]), 0
    while case.kill != "none" and not ended.wait(case.kill_every):
        place, turn = turn % len(hosts), turn + 1
        if case.kill == "maker":
            old = names[place][0]
            names[place][0] = f"{old}.{turn}"
            ray.get(hosts[place].replace.remote(old, names[place][0]), timeout=WAIT)
            ray.get(coordinator.release.remote(old), timeout=WAIT)
            continue
        ray.kill(hosts[place])
        for name in names[place]:
            ray.get(coordinator.release.remote(name), timeout=WAIT)
        names[place] = [f"{name.split('.')[0]}.{turn}" for name in names[place]]
        hosts[place] = ray.remote(num_cpus=0, max_concurrency=1000)(Makers).remote(case, coordinator, names[place])
        work[place] = hosts[place].run.remote()


def _resident(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def bytes_per_sample(group_kb: int) -> float:
    """Bytes per sample in a message to the coordinator, including references."""
    context = ray._private.worker.global_worker.get_serialization_context()
    groups = [_group(_tensors(group_kb), position, 0) for position in range(8)]
    made = store_groups(groups, "maker-0", texts=True)
    return float(context.serialize(made).total_bytes) / (len(groups) * SAMPLES)


GRID = (
    Case(makers=8, group_kb=64, ranks=1, by_value=True),
    Case(makers=8, group_kb=64, ranks=1),
    Case(makers=8, group_kb=1024, ranks=1, groups=64, by_value=True),
    Case(makers=8, group_kb=1024, ranks=1, groups=64),
    Case(makers=8, group_kb=1024, ranks=8, groups=64, by_value=True),
    Case(makers=8, group_kb=1024, ranks=8, groups=64),
    Case(makers=64, group_kb=64, ranks=8),
    Case(makers=64, group_kb=64, ranks=32),
    Case(makers=256, group_kb=64, ranks=8, kill="maker", episodes=10),
    Case(makers=64, group_kb=64, ranks=1, kill="host", episodes=10),
)


def grid() -> dict[str, Any]:
    """Run the short grid: print each case and return the figures of the last line."""
    rows = []
    for case in GRID:
        rows.append(simulate(case))
        print(json.dumps(rows[-1]), flush=True)
    names = {(64, 1): "64 KB", (1024, 1): "1 MB", (1024, 8): "1 MB, 8 ranks"}
    speeds: tuple[dict[str, float], dict[str, float]] = {}, {}  # by reference, by value
    for row in rows:
        if row["makers"] == 8:
            speeds[row["by_value"]][names[row["group_kb"], row["ranks"]]] = row["groups_per_second"]
    today, before = speeds
    return {
        "coordinator_bytes_per_sample": {str(kb): round(bytes_per_sample(kb)) for kb in (64, 1024)},
        "groups_per_second": today,
        "times_by_value": {name: round(speed / before[name], 2) for name, speed in today.items()},
        "rank8_over_rank1": round(today["1 MB"] / today["1 MB, 8 ranks"], 2),
        "lost": sum(row["lost"] for row in rows),
        "doubled": sum(row["doubled"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Case()).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(value), default=None)
    chosen = {name: value for name, value in vars(parser.parse_args()).items() if value not in (None, False)}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30)
    try:
        print(json.dumps(simulate(Case(**chosen)) if chosen else grid()))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
