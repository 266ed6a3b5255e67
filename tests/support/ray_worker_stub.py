"""What a raylet starts as a worker: it asks for a forked one (see `quick_ray.py`) and ends when and as that does."""

import json
import os
import signal
import socket
import struct
import sys

if __name__ == "__main__":
    order = {"arguments": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}
    text = json.dumps(order).encode()
    with socket.socket(socket.AF_UNIX) as source:
        source.connect(os.environ["RLHF_TEST_RAY_WORKERS"])
        socket.send_fds(source, [struct.pack("!Q", len(text))], [0, 1, 2])
        source.sendall(text)
        answer = source.recv(4)
    code = struct.unpack("!i", answer)[0] if len(answer) == 4 else 1
    if code < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(code)
