"""Traces episodes with torch's profiler. The hooks of the run define the regions of a trace."""

from __future__ import annotations

import logging
from typing import Any

from rlhf_core.components import HookContext
from rlhf_core.hookspecs import hookimpl

from .plugin import ProfilerConfig

logger = logging.getLogger("rlhf.profiler")


class Profiler:
    """Starts torch's profiler at the start of a chosen episode and writes its trace at the end."""

    def __init__(self, config: ProfilerConfig, context: HookContext) -> None:
        self._config = config
        self._folder = context.run_folder / config.folder
        self._profile: Any = None
        self._regions: list[tuple[str, Any]] = []
        self._has_snapshot = False

    @hookimpl
    def rlhf_episode_start(self, episode: int) -> None:
        if episode not in self._config.episodes:
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        has_gpu = torch.cuda.is_available()
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])],
            record_shapes=self._config.shapes,
            profile_memory=self._config.memory,
            with_stack=self._config.stacks,
        )
        self._has_snapshot = self._config.memory and has_gpu
        if self._has_snapshot:
            # C++ frames would be named by `addr2line` processes, one per library, which never end.
            torch.cuda.memory._record_memory_history(stacks="python")
        self._profile.start()

    @hookimpl
    def rlhf_episode_end(self, episode: int) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        while self._regions:
            self._regions.pop()[1].__exit__(None, None, None)
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"episode-{episode}.json"
        profile.export_chrome_trace(str(trace))
        logger.info("episode %d is traced in %s", episode, trace)
        if self._has_snapshot:
            import torch

            torch.cuda.memory._dump_snapshot(str(self._folder / f"episode-{episode}-memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    @hookimpl
    def rlhf_make_experience_start(self) -> None:
        self._open("rollout")

    @hookimpl
    def rlhf_reward_end(self) -> None:
        self._close("rollout")
        self._open("scoring")  # the rest of making experience

    @hookimpl
    def rlhf_make_experience_end(self) -> None:
        self._close("scoring")

    @hookimpl
    def rlhf_batch_start(self) -> None:
        self._open("update")

    @hookimpl
    def rlhf_batch_end(self) -> None:
        self._close("update")

    @hookimpl
    def rlhf_sync_start(self) -> None:
        self._open("sync")

    @hookimpl
    def rlhf_sync_end(self) -> None:
        self._close("sync")

    def _open(self, name: str) -> None:
        if self._profile is None:
            return
        from torch.profiler import record_function

        region: Any = record_function(f"rlhf/{name}")
        region.__enter__()
        self._regions.append((name, region))

    def _close(self, name: str) -> None:
        if self._regions and self._regions[-1][0] == name:
            self._regions.pop()[1].__exit__(None, None, None)
