"""A fake worker in a process of its own, which can be killed: `python -m ... PORT`."""

import subprocess
import sys
import threading

from loadtest.child_service import free_port
from tests.client.fake_worker import FakeWorker


class WorkerProcess:
    """Answers while it is not killed; may be started again, on the same port."""

    def __init__(self) -> None:
        self.port = free_port()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.client.worker_process", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> "WorkerProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


if __name__ == "__main__":
    with FakeWorker(port=int(sys.argv[1])):
        sys.stdout.write("up\n")
        sys.stdout.flush()
        threading.Event().wait()
