"""Weight sync of the transport `ray` compared with copying the same bytes once: full, chunked, direct and LoRA.

    python benchmarks/weight_sync.py [--megabytes 10 100 500] [--makers 1 4 16] [--repeats 5]

One process publishes a model of this many MB through the run's own coordinator to actors. They store it in addition to
their live weights, check names, shapes and checksum, and swap it in. `copy` is `Tensor.copy_` of the model into
another, in as many processes at once as there are makers: on one machine, makers share its cores and its memory. Every
process uses one thread, like two actors that share two cores. Times are medians, printed as ratios to `copy`, with the
sender's processor time, which many makers must not change. `direct` uses gloo, here over the loopback interface. `lora`
sends a hundredth of the bytes, and is compared with copying everything.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import ray
import torch
from torch import nn

from rlhf_core.strategy import TrainedModel
from rlhf_ray.calls import node_address
from rlhf_ray.cluster import connect
from rlhf_ray.config import RayConfig
from rlhf_ray.coordinator_actor import Coordinator
from rlhf_ray.direct_link import DirectChunk, LinkOffer, MakerEnd
from rlhf_ray.holder_weights import StagedWeights
from rlhf_ray.ray_sync import RunSync
from rlhf_ray.wire import unpack
from rlhf_strategies import state_dict_shards_of

SIDE = 512
LAYER_BYTES = 4 * SIDE * SIDE
CHUNK_BYTES = 16 * 1024**2
_WARM_UP = 8


def make_model(megabytes: int) -> nn.Module:
    """Create square layers of 1 MB. One in a hundred (at least one) is the adapter."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(max(1, megabytes * 10**6 // LAYER_BYTES))))


def adapter_of(model: nn.Module) -> frozenset[str]:
    return frozenset(name for index, (name, _) in enumerate(model.named_parameters()) if index % 100 == 0)


class Receiver:
    """A maker that only receives weights."""

    def __init__(self, name: str, coordinator: Any, megabytes: int) -> None:
        torch.set_num_threads(1)
        model = make_model(megabytes).requires_grad_(False)
        self._weights = StagedWeights({"policy": model}, {"policy": adapter_of(model)})
        self._link = MakerEnd()
        actor = ray.get_runtime_context().current_actor
        ray.get(coordinator.register.remote(name, 0, "here", 0, actor), timeout=60)

    def join_link(self, offer: LinkOffer) -> None:
        self._link.join(offer, node_address(), torch.device("cpu"))

    def join_link_as_sender(self, receiver: str, offer: LinkOffer) -> None:
        self._link.join_as_sender(receiver, offer, node_address(), torch.device("cpu"))

    def update_experience_maker(
        self,
        *,
        version: int,
        sender: str,
        fully_update: bool,
        new_actor_state_dict: dict[str, Any] | DirectChunk | None = None,
        checksums: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Receive an update like `ExperienceMakerHolder`."""
        if options.get("chunk_start"):
            self._weights.begin(version, sender=sender, adapter_only=not fully_update)
        if new_actor_state_dict is not None:
            chunk = new_actor_state_dict
            arrived = self._link.receive(chunk) if isinstance(chunk, DirectChunk) else unpack(chunk)
            self._weights.stage(version, "policy", arrived, sender=sender)
        if checksums is not None:
            self._link.wait_until_forwarded()
            self._weights.commit(version, checksums, sender=sender)

    def wait_for(self, version: int) -> None:
        self._weights.wait_live(version, timeout_seconds=120)


class OneProcess:
    """The part of a strategy that a sync uses."""

    is_main = True
    device = torch.device("cpu")

    def state_dict_shards(
        self, model: nn.Module, max_shard_bytes: int, only: Callable[[str], bool] | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        return state_dict_shards_of(model, max_shard_bytes, only)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def run_on_main(self, action: Callable[[], None]) -> None:
        action()


class Copier:
    """A process that copies a model."""

    def __init__(self, megabytes: int) -> None:
        torch.set_num_threads(1)
        self._source, self._target = make_model(megabytes), make_model(megabytes)

    def copy(self) -> None:
        with torch.no_grad():
            for a, b in zip(self._target.parameters(), self._source.parameters(), strict=True):
                a.copy_(b)


def time_copy(megabytes: int, makers: int, repeats: int) -> float:
    """Seconds until this process, or each of many processes at once, has copied the model."""
    if makers == 1:
        return median(Copier(megabytes).copy, repeats)[0]
    actors = [ray.remote(Copier).options(num_cpus=0).remote(megabytes) for _ in range(makers)]
    seconds, _ = median(lambda: ray.get([actor.copy.remote() for actor in actors], timeout=120), repeats)
    for actor in actors:
        ray.kill(actor)
    return seconds


def time_sync(
    mode: Literal["full", "chunked", "direct", "adapter"], megabytes: int, makers: int, repeats: int
) -> tuple[float, float, float]:
    """Seconds from a publish until every maker generates with it, the sender's processor seconds, and bytes sent."""
    settings = RayConfig(prompts_per_lease=1, max_staleness=0, lease_seconds=600, heartbeat_seconds=600)
    coordinator: Any = (
        ray.remote(Coordinator)
        .options(num_cpus=0)
        .remote(settings, num_makers=makers, num_episodes=1, prompts_per_episode=1)
    )
    receiver = ray.remote(Receiver).options(num_cpus=0)
    actors = [receiver.remote(f"maker-{index}", coordinator, megabytes) for index in range(makers)]
    ray.get(coordinator.wait_for_makers.remote(120), timeout=180)
    model = make_model(megabytes)
    config = RayConfig(sync=mode, max_shard_bytes=CHUNK_BYTES, sync_timeout_seconds=120)
    strategy: Any = OneProcess()
    trained = {"policy": TrainedModel(model, None, None)}  # type: ignore[arg-type]
    sync = RunSync(coordinator, strategy, trained, {"policy": adapter_of(model)}, config)
    version = 0

    def publish() -> None:
        nonlocal version
        version += 1
        sync.publish(version)
        ray.get([actor.wait_for.remote(version) for actor in actors], timeout=120)

    seconds, processor_seconds = median(publish, repeats)
    assert not sync.metrics().get("sync/fallbacks"), "some of it went through the object store"
    for actor in [*actors, coordinator]:
        ray.kill(actor)
    return seconds, processor_seconds, sync.metrics()["sync/bytes"]


def median(action: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds, and processor seconds of this process, of `repeats` calls.

    Earlier calls are warm-up, since shared memory is slow when first written.
    """
    times, busy = [], []
    for _ in range(_WARM_UP + repeats):
        started, used = time.perf_counter(), time.process_time()
        action()
        times.append(time.perf_counter() - started)
        busy.append(time.process_time() - used)
    return statistics.median(times[_WARM_UP:]), statistics.median(busy[_WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--makers", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    modes: tuple[Literal["full", "chunked", "direct", "adapter"], ...] = ("full", "chunked", "direct", "adapter")
    print("| MB | makers | copy, ms | full | chunked | direct | lora | sender, ms: full / direct | bytes full / lora |")
    print("|---|---|---|---|---|---|---|---|---|")
    with connect(RayConfig()):
        for megabytes, makers in itertools.product(arguments.megabytes, arguments.makers):
            copy = time_copy(megabytes, makers, arguments.repeats)
            row = {mode: time_sync(mode, megabytes, makers, arguments.repeats) for mode in modes}
            ratios = " | ".join(f"{seconds / copy:.1f} x" for seconds, _, _ in row.values())
            busy = f"{row['full'][1] * 1000:.0f} / {row['direct'][1] * 1000:.0f}"
            sent = f"{row['full'][2]:,.0f} / {row['adapter'][2]:,.0f}"
            print(f"| {megabytes} | {makers} | {copy * 1000:.1f} | {ratios} | {busy} | {sent} |", flush=True)


if __name__ == "__main__":
    main()
