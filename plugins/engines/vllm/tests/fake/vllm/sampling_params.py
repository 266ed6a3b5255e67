"""How much a request tells."""


class RequestOutputKind:
    FINAL_ONLY = 2
    DELTA = 1
