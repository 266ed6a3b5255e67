"""A raylet starts this stub as a worker. It requests a forked one (see `quick_ray.py`) and exits with its status."""

import json
import os
import runpy
import signal
import socket
import struct
import sys

_PATIENCE_SECONDS = 60.0


def _forked(source: socket.socket) -> bool:
    """Whether a worker was forked for this stub."""
    order = {"arguments": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}
    text = json.dumps(order).encode()
    source.settimeout(_PATIENCE_SECONDS)
    try:
        source.connect(os.environ["RLHF_TEST_RAY_WORKERS"])
        socket.send_fds(source, [struct.pack("!Q", len(text))], [0, 1, 2])
        source.sendall(text)
        return source.recv(1) == b"+"
    except OSError:
        return False


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as source:
        if not _forked(source):
            source.close()
            runpy.run_module("ray._private.workers.setup_worker", run_name="__main__")
            sys.exit()
        source.settimeout(None)
        try:
            answer = source.recv(4)
        except OSError:
            answer = b""
    code = struct.unpack("!i", answer)[0] if len(answer) == 4 else 1
    if code < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(code)
