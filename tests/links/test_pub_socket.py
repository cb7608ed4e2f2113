"""The PUB of a replica where there is nothing left to bind it with."""

import subprocess
import sys

# Of a process of its own: libzmq would abort it.
BINDING = """
import os, resource, sys
import zmq, zmq.asyncio
from lean_selector.publisher import KvEventPublisher
from lean_selector.links.pub_socket import ReplicaPub, ReplicaSyncError

context = zmq.asyncio.Context()
context.socket(zmq.PUB).close(0)  # its threads have theirs
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
open_now = len(os.listdir("/proc/self/fd"))
for free in range(0, 48, 2):
    for make in (
        lambda: ReplicaPub(context, "tcp://127.0.0.1:*", 10),
        lambda: KvEventPublisher(kv_block_size=4, endpoint="tcp://127.0.0.1:*"),
    ):
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + free, hard))
        made = None
        try:
            made = make()
        except OSError as error:
            print(error.errno)
        except zmq.ZMQError as error:
            print(error.errno)
        except ReplicaSyncError as error:
            print(24 if os.strerror(24) in str(error) else error)
        else:
            print("bound")
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if made is not None:
            made.close()
"""


def test_without_descriptors_it_is_not_bound_and_the_process_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BINDING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"24", "bound"}  # EMFILE
