"""`ExperienceMakerHolder`: the maker of every detached run, whether created directly or by a run file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import ray

from rlhf_core.errors import DeadlineError, RlhfError, UserInputError
from rlhf_core.hooks import HookRelay
from rlhf_core.types import Prompt
from rlhf_seed import BatchReader, adapt_callback, batches_of, sampling_params

from .actor_context import ActorContext, ActorSpec, set_up_process, show_debug_messages
from .calls import NamedActors, node_address, own_name
from .direct_link import DirectChunk, LinkOffer, MakerEnd
from .id_tokenizer import IdTokenizer
from .maker_feed import LoaderFeed, MakerFeed, RunFeed
from .maker_parts import MakerWorker, make_place, make_worker
from .wire import unpack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
"""Interval of checks for failed batches. The deadline of a batch is that of its lease."""


@ray.remote(concurrency_groups={"experience_io": 1, "model_io": 1, "compute": 1})  # type: ignore[call-overload]
class ExperienceMakerHolder:
    """Makes experience from a data loader's prompts and sends it to `DetachedTrainer` actors in turn.

    With `--transport ray` it receives its prompts from the coordinator and sends the samples there (`work`). Start it
    under the name that trainers use to find it. New weights arrive while it generates and are swapped in between two
    batches, whole versions only.

    Args:
        detached_trainer_name_list: Names of the actors that receive the samples, in turn.
        strategy_fn: Returns a core `Strategy`, or anything else for one process and one device.
        model_fn: Returns (actor, critic, reward model, initial model). The critic may be None. The actor is a causal
            LM, the reward a function f(rollouts), a reward model or an installed reward's name, and the initial model
            the reference of the KL penalty.
        env_info: Environment variables of a process group (rank, world_size, master_addr, master_port).
        sync_models_from_trainers: Start only after a trainer has sent its full weights.
        buffer_cpu_offload: Ignored, since samples are always sent from CPU memory.
        kl_coef: Factor of the KL penalty, sent with every sample. 0 skips the reference.
        callbacks: Hook plugins (`rlhf_…`), or objects with the seed's `on_…` methods.
        eval_performance: Print throughput when a loop ends.
        debug: Print debug messages.
        update_lora_weights: After the first sync, trainers send only the LoRA weights.
        tokenizer: Required if prompts are texts.
        seed: Seed of sampling.
        engine, engine_options: Name and options of an installed rollout engine that shares the actor's module.
        first_sync_timeout_seconds: Maximum wait for the first weights with `sync_models_from_trainers`.
        send_timeout_seconds: Maximum wait for a trainer to take samples.
        actor_timeout_seconds: Maximum wait for a named trainer that has not started yet.
        sync_idle_seconds: Time without a chunk after which an incomplete version is dropped.
        reward_timeout_seconds: Maximum duration of a call of the reward.
        run: Set by `--transport ray`. The other arguments are then ignored.
        generate_kwargs: `max_length` (prompt and response), `max_new_tokens`, `temperature`, `top_k`, `top_p`,
            `do_sample`, `stop`, `stop_token_ids`, `eos_token_id`.
    """

    _worker: MakerWorker
    _feed: LoaderFeed | RunFeed
    _unnumbered: dict[str, int]
    """Sender -> version of an incomplete transfer for which it gave no number."""

    def __init__(
        self,
        detached_trainer_name_list: list[str],
        strategy_fn: Callable[[], Any],
        model_fn: Callable[[], tuple[Any, Any, Any, Any]],
        env_info: dict[str, str] | None = None,
        sync_models_from_trainers: bool = False,
        buffer_cpu_offload: bool = True,
        kl_coef: float = 0.1,
        callbacks: list[Any] = [],  # noqa: B006 - the seed's default, never changed
        eval_performance: bool = False,
        debug: bool = False,
        update_lora_weights: bool = False,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        seed: int = 0,
        engine: str = "hf",
        engine_options: Mapping[str, Any] = {},
        first_sync_timeout_seconds: float = 1800.0,
        send_timeout_seconds: float = 1800.0,
        actor_timeout_seconds: float = 60.0,
        sync_idle_seconds: float = 600.0,
        reward_timeout_seconds: float = 600.0,
        run: ActorSpec | None = None,
        **generate_kwargs: Any,
    ) -> None:
        self._name = own_name()
        self._update_lora_weights = update_lora_weights
        self._initialized = threading.Event()
        if not sync_models_from_trainers:
            self._initialized.set()
        self._unnumbered, self._link = {}, MakerEnd()
        if run is not None:
            self._context = ActorContext(self._name, run)
            return
        if not detached_trainer_name_list:
            raise UserInputError("detached_trainer_name_list is empty", where="ExperienceMakerHolder")
        if debug:
            show_debug_messages()
        set_up_process(env_info)
        hooks = HookRelay()
        self._eval_performance = eval_performance
        for callback in callbacks:
            hooks.register(adapt_callback(callback))
        sampling = sampling_params(generate_kwargs, tokenizer)
        eos_token_id = generate_kwargs.get("eos_token_id")
        decoder = tokenizer if tokenizer is not None else IdTokenizer(eos_token_id)
        self._worker = make_worker(
            model_fn,
            make_place(strategy_fn),
            decoder,
            sampling,
            hooks,
            eos_token_id=eos_token_id,
            engine=engine,
            engine_options=engine_options,
            seed=seed,
            kl_coef=kl_coef,
            reward_timeout_seconds=reward_timeout_seconds,
            sync_idle_seconds=sync_idle_seconds,
        )
        self._loader_feed = self._feed = LoaderFeed(
            self._name,
            hooks,
            BatchReader(tokenizer, decoder, needs_mask=False),
            NamedActors(detached_trainer_name_list, timeout_seconds=actor_timeout_seconds),
            timeout_seconds=send_timeout_seconds,
        )
        self._first_sync_timeout_seconds = first_sync_timeout_seconds

    def workingloop(self, dataloader_fn: Callable[[], Iterable[Any]], num_epochs: int = 1, num_steps: int = 0) -> None:
        """Make and send the experience of `num_epochs` passes over a data loader.

        Returns when the trainers have taken everything, and notifies them. An error of the loop is reported to them
        too, and raised.

        Args:
            dataloader_fn: Returns the data loader. A batch is a mapping of columns (`input_ids`, `attention_mask`,
                `answer`, …), a tensor of ids, or a list of texts or records.
            num_epochs: Passes over the data loader.
            num_steps: If > 0, number of batches, in as many passes as needed.
        """
        self._wait_for_first_weights()
        feed = self._loader_feed
        feed.announce()
        try:
            feed.loaded = batches_of(dataloader_fn(), num_epochs, num_steps, where="dataloader_fn")
            self._make_all()
        except Exception as error:
            self._report_failure(error)
            raise
        if self._eval_performance:
            print(feed.performance())
        feed.announce_end(None)

    def work(self) -> None:
        """Load everything, then make the samples that a run's coordinator requests until the run is over."""
        with RunFeed.load(self._context) as feed:
            self._feed, self._worker = feed, feed.worker
            feed.join(self.update_experience_maker)
            self._make_all()

    @ray.method(concurrency_group="model_io")
    def update_experience_maker(
        self,
        new_actor_state_dict: dict[str, Any] | DirectChunk | None = None,
        new_actor_lora_config_dict: dict[str, Any] | None = None,
        new_critic_state_dict: dict[str, Any] | DirectChunk | None = None,
        new_critic_lora_config_dict: dict[str, Any] | None = None,
        fully_update: bool = False,
        chunk_start: bool | None = None,
        chunk_end: bool | None = None,
        *,
        version: int | None = None,
        sender: str = "",
        checksums: dict[str, str] | None = None,
    ) -> None:
        """Receive a part of a new version: its start, a chunk of weights, or its end.

        The live weights do not change before the end. Then names, shapes and checksums are verified, and the version is
        swapped in between two batches. Outside a version, a call that marks neither start nor end is a whole
        version.

        Args:
            new_actor_state_dict, new_critic_state_dict: Tensors or `PackedTensor`s, or a chunk of a direct link.
            new_actor_lora_config_dict, new_critic_lora_config_dict: `lora_scales` of the sender.
            fully_update: Whether the version has all weights, regardless of `update_lora_weights`.
            chunk_start: Whether the call starts a version.
            chunk_end: Whether the call ends a version.
            version: Policy version. None is one more than the newest.
            sender: Name that distinguishes the versions of several senders.
            checksums: Role -> checksum, sent with the end.

        Raises:
            SyncError: Weights are missing or do not match. The live weights are kept.
        """
        weights = self._worker.weights
        is_whole = version is None and not chunk_start and not chunk_end and sender not in self._unnumbered
        if version is None:
            version = self._unnumbered.setdefault(sender, (weights.newest or 0) + 1)
        if chunk_start or is_whole:
            weights.begin(version, sender=sender, adapter_only=self._update_lora_weights and not fully_update)
        for role, chunk, scales in (
            ("policy", new_actor_state_dict, new_actor_lora_config_dict),
            ("critic", new_critic_state_dict, new_critic_lora_config_dict),
        ):
            if chunk is not None:
                arrived = self._link.receive(chunk) if isinstance(chunk, DirectChunk) else unpack(chunk)
                weights.stage(version, role, arrived, sender=sender, scales=scales)
        if chunk_end or is_whole:
            self._link.wait_until_forwarded()
            self._unnumbered.pop(sender, None)
            weights.commit(version, checksums, sender=sender)
            if fully_update:
                self._initialized.set()

    @ray.method(concurrency_group="model_io")
    def join_link(self, offer: LinkOffer) -> None:
        """Form this maker's end of a direct link, over which a trainer sends chunks."""
        self._link.join(offer, node_address(), self._worker.device)

    @ray.method(concurrency_group="model_io")
    def join_link_as_sender(self, receiver: str, offer: LinkOffer) -> None:
        """Form this maker's end of a link to the maker `receiver`, to which it forwards chunks."""
        self._link.join_as_sender(receiver, offer, node_address(), self._worker.device)

    @ray.method(concurrency_group="model_io")
    def get_policy_version(self) -> int:
        """Newest version of the weights that generate samples. 0 before the first."""
        return self._worker.weights.newest or 0

    def _make_all(self) -> None:
        """Make the experience of all batches, each while the previous one is being sent or others are generated."""
        feed = self._feed
        with feed.heartbeat(), feed.hooks.span("maker_loop", maker=feed.number):
            if isinstance(feed, RunFeed) and self._worker.max_batches > 1:
                BatchPool(self._worker, feed).make_all()
            else:
                for era, prompts in feed.batches():
                    _make_and_send(self._worker, feed, era, prompts)
            feed.flush()

    def _wait_for_first_weights(self) -> None:
        if not self._initialized.wait(self._first_sync_timeout_seconds):
            raise DeadlineError(
                f"waited {self._first_sync_timeout_seconds:g} s for a trainer's weights",
                where=f"experience maker {self._name!r}",
                hint="call sync_models_to_remote_makers on a trainer, or set sync_models_from_trainers=False",
            )

    def _report_failure(self, error: Exception) -> None:
        """Report a failure of the loop to the trainers, which would otherwise wait for samples."""
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        try:
            self._loader_feed.announce_end(message)
        except RlhfError as unreachable:
            logger.error("cannot report to a trainer that the loop failed: %s", unreachable)


class BatchPool:
    """Makes several batches concurrently, so that the engine has work while the last answers of one batch finish."""

    def __init__(self, worker: MakerWorker, feed: RunFeed) -> None:
        """Create the pool. `worker.max_batches` batches are made at a time."""
        self._worker = worker
        self._feed = feed
        self._open: set[Future[None]] = set()

    def make_all(self) -> None:
        """Make batches until the feed is exhausted. Raises the first error of a batch."""
        with ThreadPoolExecutor(self._worker.max_batches, thread_name_prefix="batch") as pool:
            for era, prompts in self._feed.batches(self._wait_for_room):
                self._open.add(pool.submit(_make_and_send, self._worker, self._feed, era, prompts))
            while self._open:
                self._collect()

    def _wait_for_room(self) -> int:
        """Wait until another batch may start, and return the number of open batches."""
        self._collect(0.0)
        while len(self._open) >= self._worker.max_batches:
            self._collect()
        return len(self._open)

    def _collect(self, seconds: float = _POLL_SECONDS) -> None:
        done, self._open = wait(self._open, seconds, FIRST_COMPLETED)
        for each in done:
            each.result()


def _make_and_send(worker: MakerWorker, feed: MakerFeed, era: int, prompts: Sequence[Prompt]) -> None:
    groups, times = worker.make(prompts)
    with feed.sending, feed.hooks.span("send", num_groups=len(groups)):
        feed.send(era, groups, times)
