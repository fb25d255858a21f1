"""The fork server: a process that has imported the slow packages, from which tests fork processes in milliseconds.

The imports take six seconds of CPU time. With pytest-xdist, all workers therefore share the server of their controller.
"""

import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker
from unittest import mock

# Modules that runs import.
SLOW_IMPORTS = [
    *("torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch._dynamo"),
    *("accelerate", "datasets", "pyarrow.csv", "pyarrow.parquet", "sklearn.datasets", "sklearn.metrics", "jinja2"),
    *("transformers", "transformers.models.auto.image_processing_auto", "transformers.models.auto.tokenization_auto"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "modernbert", "resnet")),
    "tests.preloaded",  # found if the tests are started in the root of the repository; otherwise left out
]


def ensure_running(environment):
    """Start a server with these environment variables, unless this process has one already."""
    multiprocessing.set_forkserver_preload(SLOW_IMPORTS)
    with mock.patch.dict(os.environ, environment, clear=True):
        forkserver._forkserver.ensure_running()


def address():
    """The address of the server that this process has started."""
    return forkserver._forkserver._forkserver_address


def use(address):
    """Let this process fork from the server at `address`, which another process has started and will end."""
    server = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # each request carries a descriptor in this place
    server.ensure_running = resource_tracker.ensure_running  # the server itself is the other process's
