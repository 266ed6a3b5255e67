class LocalTransport:

    def run(self, request: RunRequest) -> FitResult:
        ...
