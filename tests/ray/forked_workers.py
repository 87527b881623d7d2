"""Ray's workers as forks of one process that has loaded torch, which costs each of them six seconds of a processor.

    raylet -> `EXECUTABLE default_worker.py ...` -> this file -> a socket -> the nursery forks a worker

Each worker is a process of its own all the same: Ray's own `default_worker.py` begins it, and it dies alone. Ray is
told of this by another `sys.executable` while it starts; what else it runs with that gets the real one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

LOADED_BY_ACTORS = (
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "transformers.integrations.deepgemm",
    "transformers.integrations.finegrained_fp8", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama",
    "nearpolicy.launch.session", "nearpolicy.launch.build", "nearpolicy.launch.diagnosis",
    "nearpolicy.launch.ray.controller", "nearpolicy.launch.ray.hosts", "nearpolicy.launch.ray.transports",
    "nearpolicy.generator.host", "nearpolicy.generator.wire", "nearpolicy.learner.parallel",
    "nearpolicy.learner.checkpoint", "nearpolicy.sync.shipping", "nearpolicy.sync.transports",
    "nearpolicy.sync.broadcast", "nearpolicy.sync.device_handles", "nearpolicy.sync.files",
    "nearpolicy.sync.shared_memory", "numpy.ma", "pyarrow", "pydantic.v1", "pydantic.deprecated.class_validators",
)  # fmt: skip
OF_RAY = (
    "ray", "ray.util.placement_group", "ray._private.async_compat", "ray._private.runtime_env.setup_hook",
    "ray.core.generated.usage_pb2",
)  # fmt: skip
WAITS_S = 60.0
"""For the nursery to be there, as long as the raylet waits for a worker."""
CPUS = 16
"""Of the Ray for tests, whatever the machine has."""


@contextlib.contextmanager
def begun_ray() -> Iterator[None]:
    from unittest import mock

    from nearpolicy.launch.ray.cluster import imported_ray

    ray = imported_ray()
    logging.getLogger("ray").setLevel(logging.ERROR)
    with forked_workers() as executable:
        with mock.patch("sys.executable", executable):
            ray.init(
                address="local",
                num_cpus=CPUS,
                include_dashboard=False,
                object_store_memory=256 << 20,
                configure_logging=False,
                log_to_driver=False,
            )
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def forked_workers() -> Iterator[str]:
    """What `sys.executable` has to be while Ray starts."""
    with tempfile.TemporaryDirectory(prefix="nearpolicy-nursery-") as folder:
        address, script = f"{folder}/socket", Path(folder, "python")
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} worker {address} {sys.executable} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        command = [sys.executable, __file__, "nursery", address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as nursery:
            try:
                loaded = nursery.stdout.readline()  # both at once would be much for two cores: Ray gives itself 30 s
                assert loaded, "the nursery of workers has not come to life"
                yield str(script)
            finally:
                nursery.kill()


def begin_worker(address: str, executable: str, arguments: list[str]) -> None:
    """In the process that the raylet has started, which stays as long as the worker."""
    if not arguments or Path(arguments[0]).name != "default_worker.py":
        os.execv(executable, [executable, *arguments])
    told = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as nursery:
        until = time.monotonic() + WAITS_S
        while nursery.connect_ex(address):
            if time.monotonic() > until:
                sys.exit(f"no nursery at {address}")
            time.sleep(0.02)
        socket.send_fds(nursery, [len(told).to_bytes(4, "big")], [0, 1, 2])
        nursery.sendall(told)
        nursery.recv(1)  # nothing comes before the worker ends


def serve(address: str) -> None:
    """Fork workers, one after another; threads do not survive that, so nothing here may start any."""
    import gc
    import signal

    from nearpolicy.machine import die_with, prepare_environment

    die_with(os.getppid())
    os.environ["OMP_NUM_THREADS"] = "1"  # as Ray does
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    prepare_environment()
    _load(LOADED_BY_ACTORS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    is_ready = False
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(64)
        print("loaded", flush=True)
        while True:
            client, _ = door.accept()
            with client:
                head, fds, _, _ = socket.recv_fds(client, 4, 3)
                told = json.loads(client.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
                if not is_ready:  # Ray's libraries read the environment when they are loaded
                    os.environ.update(told["environment"])
                    _load(OF_RAY)
                    assert len(os.listdir("/proc/self/task")) == 1, "something that actors load starts threads"
                    gc.collect()
                    gc.freeze()
                    is_ready = True
                if os.fork() == 0:
                    door.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    be_worker(fds, **told)
                for fd in fds:
                    os.close(fd)


def _load(names: Iterable[str]) -> None:
    import importlib

    for name in names:
        importlib.import_module(name)


def be_worker(fds: list[int], arguments: list[str], environment: dict[str, str], folder: str) -> None:
    import random
    import runpy
    import traceback

    import numpy

    try:
        os.setsid()  # the raylet kills the process group of a worker that has gone
        for place, fd in enumerate(fds):
            os.dup2(fd, place)
            os.close(fd)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        random.seed()
        numpy.random.seed()
        sys.argv = arguments
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        begin_worker(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        serve(sys.argv[2])
