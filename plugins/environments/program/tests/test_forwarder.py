"""The forwarder does not let a program use up the open files of the training process."""

import asyncio
import socket

from rlhf_program.forwarder import Forwarder

NUM_CLIENTS, NUM_SLOTS = 40, 16


async def echo(reader, writer):
    writer.write(await reader.readexactly(1))
    await reader.read()
    writer.close()


async def answer(client):
    reader, writer = await asyncio.open_connection(sock=client)
    writer.write(b"x")
    received = await reader.readexactly(1)
    writer.close()
    return received


async def flood():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    forwarder = Forwarder(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    clients = [socket.create_connection(listener.getsockname(), 20) for _ in range(NUM_CLIENTS)]
    forwarder.start(listener)
    while forwarder.num_connections < NUM_SLOTS:
        await asyncio.sleep(0.01)
    for _ in range(100):
        await asyncio.sleep(0)
    accepted = forwarder.num_connections
    answers = await asyncio.gather(*map(answer, clients))
    forwarder.stop()
    await forwarder.wait_closed()
    server.close()
    return accepted, answers, forwarder.num_connections, listener.fileno()


def test_connections_wait_for_a_slot():
    accepted, answers, finally_accepted, descriptor = asyncio.run(asyncio.wait_for(flood(), 60))
    assert accepted == NUM_SLOTS and answers == [b"x"] * NUM_CLIENTS
    assert (finally_accepted, descriptor) == (NUM_CLIENTS, -1)


def test_a_dead_endpoint_is_reported():
    async def fault():
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        forwarder = Forwarder(f"http://127.0.0.1:{port}/v1")
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        forwarder.start(listener)
        with socket.create_connection(address, 20):
            text = await asyncio.wait_for(forwarder.fault, 30)
        forwarder.stop()
        await forwarder.wait_closed()
        return text

    assert "refused" in asyncio.run(fault()) or "Connect call failed" in asyncio.run(fault())
