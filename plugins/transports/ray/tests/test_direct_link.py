"""A direct link: both ends in one process, formed and broken for real."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
import torch
from running import PATIENCE_SECONDS
from torch import Tensor

from rlhf_ray.direct_link import (
    SENDER,
    DirectChunk,
    Link,
    LinkError,
    LinkOffer,
    MakerEnd,
    copy_to,
    form_link,
)
from rlhf_strategies import served_store

HERE = "127.0.0.1"
CPU = torch.device("cpu")
SHARD = {
    "float": torch.arange(5, dtype=torch.float32),
    "brain": torch.full((3, 2), 1.5, dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
    "column": torch.arange(6.0).view(2, 3)[:, 1],
}


def same(arrived: dict[str, Tensor], sent: dict[str, Tensor]) -> bool:
    return arrived.keys() == sent.keys() and all(
        torch.equal(arrived[name], sent[name]) and arrived[name].dtype == sent[name].dtype for name in sent
    )


@pytest.fixture
def ends() -> Iterator[Callable[..., tuple[Link, MakerEnd]]]:
    """`ends(timeout_seconds)`: the trainer's and the maker's end of a link."""
    made: list[Link] = []

    def make(timeout_seconds: float = PATIENCE_SECONDS) -> tuple[Link, MakerEnd]:
        store = served_store(HERE, timeout=timedelta(seconds=PATIENCE_SECONDS))
        offer = LinkOffer(HERE, store.port, "a key", "cpu", timeout_seconds=PATIENCE_SECONDS)
        maker = MakerEnd()
        joining = threading.Thread(target=maker.join, args=(offer, HERE, CPU))
        joining.start()
        link = form_link(store, SENDER, offer, HERE)
        joining.join(PATIENCE_SECONDS)
        assert maker._link is not None
        link._timeout_seconds = maker._link._timeout_seconds = timeout_seconds
        made.append(link)
        return link, maker

    yield make
    for link in made:
        link.close()


def test_every_dtype_and_shape_arrives_as_it_was(ends: Callable[..., tuple[Link, MakerEnd]]) -> None:
    link, maker = ends()
    for index in range(6):  # more than may be under way
        chunk = DirectChunk.of(SHARD, index * len(SHARD))
        link.send(copy_to(SHARD, CPU), chunk.first)
        assert same(maker.receive(chunk), SHARD)
    link.wait_until_sent()


def forward_to(sender: MakerEnd, name: str) -> MakerEnd:
    """Link another maker to one that forwards to it."""
    store = served_store(HERE, timeout=timedelta(seconds=PATIENCE_SECONDS))
    offer = LinkOffer(HERE, store.port, f"to {name}", "cpu", timeout_seconds=PATIENCE_SECONDS)
    receiver = MakerEnd()
    sender.join_as_sender(name, offer, HERE, CPU)
    receiver.join(offer, HERE, CPU)
    sender._next[name].result(PATIENCE_SECONDS)  # its thread reads from the store
    return receiver


def test_makers_forward_a_chunk(ends: Callable[..., tuple[Link, MakerEnd]]) -> None:
    link, first = ends()
    second = forward_to(first, "second")
    third = forward_to(second, "third")
    for index in range(0, 6 * len(SHARD), len(SHARD)):  # more chunks than may be under way
        link.send(copy_to(SHARD, CPU), index)
        assert same(first.receive(DirectChunk.of(SHARD, index, (("second", index),))), SHARD)
        assert same(second.receive(DirectChunk.of(SHARD, index, (("third", index),))), SHARD)
        assert same(third.receive(DirectChunk.of(SHARD, index)), SHARD)
    for maker in (first, second, third):
        maker.wait_until_forwarded()


def test_a_maker_that_lost_its_link_does_not_let_its_receivers_wait(
    ends: Callable[..., tuple[Link, MakerEnd]],
) -> None:
    link, first = ends()
    second = forward_to(first, "second")
    third = forward_to(second, "third")
    second._link = None
    with pytest.raises(LinkError, match="this maker is not linked"):
        second.receive(DirectChunk.of(SHARD, 0, (("third", 0),)))
    with pytest.raises(LinkError, match="the link broke"):
        third.receive(DirectChunk.of(SHARD, 0))
    link.send(copy_to(SHARD, CPU), 0)
    assert same(first.receive(DirectChunk.of(SHARD, 0, (("second", 0),))), SHARD)
    first.wait_until_forwarded()
    assert not first._next, "the broken link is closed"


def test_a_link_that_is_formed_too_late_is_closed(ends: Callable[..., tuple[Link, MakerEnd]]) -> None:
    link, receiver = ends()
    sender, forming = MakerEnd(), Future[Link]()
    sender._next["late"] = forming
    sender._close()
    forming.set_result(link)
    with pytest.raises(LinkError, match="the link broke"):
        receiver.receive(DirectChunk.of(SHARD, 0))


def test_a_shard_may_change_as_soon_as_it_is_copied() -> None:
    shard = {"weight": torch.ones(10)}
    copies = copy_to(shard, CPU)
    shard["weight"].zero_()
    assert bool((copies["weight"] == 1).all())


def test_a_trainer_that_is_gone_is_an_error_at_the_maker(ends: Callable[..., tuple[Link, MakerEnd]]) -> None:
    link, maker = ends()
    chunk = DirectChunk.of(SHARD, 0)
    link.close()
    with pytest.raises(LinkError, match="the link broke: .*onnection closed by peer"):
        maker.receive(chunk)
    with pytest.raises(LinkError, match="this maker is not linked"):
        maker.receive(chunk)


def test_a_maker_that_is_gone_is_an_error_at_the_trainer(ends: Callable[..., tuple[Link, MakerEnd]]) -> None:
    link, maker = ends()
    maker._link = None
    with pytest.raises(LinkError, match="the link broke"):
        for index in range(3):
            link.send(copy_to({"weight": torch.ones(1_000_000)}, CPU), index)
            link.wait_until_sent()


@pytest.mark.parametrize("side", ["sends", "receives"])
def test_an_end_that_does_nothing_is_waited_for_so_long(side: str, ends: Callable[..., tuple[Link, MakerEnd]]) -> None:
    link, maker = ends(0.05)
    with pytest.raises(LinkError, match=r"Timed out waiting 50ms"):
        if side == "sends":
            link.send(copy_to({"weight": torch.ones(10_000_000)}, CPU), 0)
            link.wait_until_sent()
        else:
            maker.receive(DirectChunk.of(SHARD, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": (("w", "float32", (-4, 4)),)}, "no tensor has dtype 'float32' and shape"),
        ({"tensors": (("w", "__doc__", (4,)),)}, "no tensor has dtype '__doc__'"),
    ],
)
def test_what_can_be_no_tensor_is_refused(change: dict[str, object], message: str) -> None:
    chunk = replace(DirectChunk.of(SHARD, 0), **change)  # type: ignore[arg-type]
    with pytest.raises(LinkError, match=message):
        chunk.empty(CPU)


def test_only_the_address_of_the_node_listens(ends: Callable[..., tuple[Link, MakerEnd]]) -> None:
    before = {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    _ends = ends()
    after = {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    assert after - before and {ip for ip, _ in after - before} == {HERE}


def test_a_maker_on_another_device_is_an_error_at_once() -> None:
    offer = LinkOffer(HERE, 1, "a key", "cuda", timeout_seconds=PATIENCE_SECONDS)
    with pytest.raises(LinkError, match="the weights are on cuda, the maker's model is on cpu"):
        MakerEnd().join(offer, HERE, CPU)


def test_a_trainer_that_does_not_answer_is_an_error_in_time() -> None:
    with socket.create_server((HERE, 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(LinkError, match=rf"no trainer answers at 127\.0\.0\.1:{port}"):
        MakerEnd().join(LinkOffer(HERE, port, "a key", "cpu", timeout_seconds=0.1), HERE, CPU)


def test_an_end_that_is_never_joined_is_an_error_in_time() -> None:
    store = served_store(HERE, timeout=timedelta(seconds=PATIENCE_SECONDS))
    with pytest.raises(LinkError, match="no gloo link was formed"):
        form_link(store, SENDER, LinkOffer(HERE, store.port, "a key", "cpu", timeout_seconds=0.1), HERE)
