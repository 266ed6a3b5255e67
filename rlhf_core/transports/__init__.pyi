from .local import LocalTransport as LocalTransport
