"""What cannot work is refused when a run with Ray begins: by name, in a bounded time, with nothing left running."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nearpolicy.config import config_from_dict
from nearpolicy.errors import ConfigError
from nearpolicy.launch.ray.calls import here, require_same_versions
from nearpolicy.launch.ray.cluster import HTTP2_SETTINGS, Cluster, _initialised
from nearpolicy.launch.ray.memory import require_memory
from nearpolicy.launch.session import Session, run_session
from nearpolicy.launch.sizes import shape_of
from nearpolicy.placement import RuntimeConfig

SHORT_S = 0.5


def joins(address: str | None = None, **needed: float) -> Cluster:
    """Connect as a run would."""
    config = RuntimeConfig(kind="ray", address=address, start_timeout_s=SHORT_S)
    return asyncio.run(Cluster.connect(config, needed))


@contextlib.contextmanager
def listener(greeting: bytes | None) -> Iterator[str]:
    """The address of what takes every connection, says this and nothing more; None: hangs up at once."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def serve() -> None:
            taken = []
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    client, _ = server.accept()
                    taken.append(client)
                    client.sendall(greeting or b"")
                    if greeting is None:
                        client.close()
            for client in taken:
                client.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:port", "head:99999", "head:0"])
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(ConfigError, match=f"runtime.address={address} is not of the form HOST:PORT"):
        joins(address)


def test_a_dead_address_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"runtime.address={address}: nothing answers there"):
        joins(address)


@pytest.mark.parametrize(
    "greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None], ids=["http", "silence", "hangs up"]
)
def test_a_port_where_something_else_listens_is_no_cluster(greeting):
    with listener(greeting) as address, pytest.raises(ConfigError, match=f"{address}.*no head node of Ray"):
        joins(address)


GIVES_UP = """
import asyncio, sys
from nearpolicy.launch.ray.cluster import Cluster
from nearpolicy.errors import ConfigError
from nearpolicy.placement import RuntimeConfig
try:
    asyncio.run(Cluster.connect(RuntimeConfig(kind="ray", address=sys.argv[1], start_timeout_s=0.5), {}))
except ConfigError as error:
    print(error)
"""


def test_a_server_that_only_sounds_like_ray_holds_up_neither_start_nor_end():
    """`ray.init` tries for minutes then; the process must end all the same."""
    with listener(HTTP2_SETTINGS) as address:
        done = subprocess.run(
            [sys.executable, "-c", GIVES_UP, address], capture_output=True, text=True, timeout=60, check=True
        )
    assert f"the cluster at {address}: not there within 0.5 s (runtime.start_timeout_s); what Ray has" in done.stdout


class LateRay:
    """Begins when it is let."""

    def __init__(self) -> None:
        self.let, self.gone = threading.Event(), threading.Event()

    def init(self) -> None:
        self.thread = threading.current_thread()
        self.let.wait(30)

    def shutdown(self) -> None:
        self.gone.set()


def test_a_ray_that_comes_when_nobody_waits_any_more_is_ended():
    late = LateRay()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(_initialised(late, threading.Event()), 0.1))
    assert not late.gone.is_set()
    late.let.set()
    assert late.gone.wait(30)


def test_the_thread_that_started_ray_stays_as_long_as_it():
    """The kernel kills what a thread has started when that thread ends."""
    ray, ended = LateRay(), threading.Event()
    ray.let.set()
    asyncio.run(_initialised(ray, ended))
    assert ray.thread.is_alive()
    ended.set()
    ray.thread.join(30)
    assert not ray.thread.is_alive() and not ray.gone.is_set()


def test_a_ray_that_does_not_start_here_is_named(monkeypatch):
    def init(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(ConfigError, match=r"no Ray starts on this machine .*timed out during startup"):
        joins()


def test_without_ray_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'nearpolicy\[ray\]'"):
        joins()


def test_a_process_that_is_connected_joins_no_other_cluster(ray_here):
    import ray

    ours = ray.get_runtime_context().gcs_address
    assert joins(ours).is_own is False
    assert joins(f"127.0.0.1:{ours.rpartition(':')[2]}").is_own is False  # the same node under another name
    with listener(HTTP2_SETTINGS) as other, pytest.raises(ConfigError, match=f"connected to the Ray at {ours} already"):
        joins(other)
    assert ray.is_initialized()


def test_more_than_there_is_in_the_cluster_is_refused_with_the_settings_to_turn(ray_here):
    with pytest.raises(ConfigError, match=r"need 1000 CPU, and it has 16 and 2 GPU, and it has 0.*learner\.ranks"):
        joins(CPU=1000.0, GPU=2.0)


async def require_all_free() -> None:
    cluster = await Cluster.connect(RuntimeConfig(kind="ray", start_timeout_s=60.0), {"CPU": 16.0})
    await cluster.make_room([{"CPU": 16.0}])
    await cluster.close()


def test_room_that_another_run_holds_is_waited_for_and_then_refused(ray_here):
    import ray

    async def two_runs() -> str:
        config = RuntimeConfig(kind="ray", start_timeout_s=60.0)
        first = await Cluster.connect(config, {"CPU": 12.0})
        second = await Cluster.connect(config.model_copy(update={"start_timeout_s": SHORT_S}), {"CPU": 12.0})
        await first.make_room([{"CPU": 12.0}])
        try:
            with pytest.raises(ConfigError) as refused:
                await second.make_room([{"CPU": 12.0}])
        finally:
            await second.close()
            await first.close()
        await require_all_free()
        return str(refused.value)

    said = asyncio.run(two_runs())
    assert "room for 1 actors: not there within 0.5 s" in said
    assert "free at the moment: 4 CPU. Other runs hold the rest" in said
    assert ray.is_initialized()


def test_nodes_with_other_versions_are_refused_by_name(ray_here):
    ours = here()
    other = replace(ours, node="spot-7", versions={**ours.versions, "torch": "1.0", "python": "3.9.1"})
    require_same_versions([ours])
    with pytest.raises(ConfigError) as refused:
        require_same_versions([ours, other])
    for part in ("torch is 1.0 on spot-7 and", "python is 3.9.1 on spot-7", "Install the same versions"):
        assert part in str(refused.value)


RECIPE = {
    "run": {"steps": 1},
    "model": {"path": "random:llama"},
    "tasks": [
        {"name": "t", "source": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "rewards": [{"kind": "number"}]}
    ],
    "learner": {"ranks": 4},
    "generator": {"replicas": 2, "kv_memory_mb": 1000},
    "runtime": "ray",
}
SHAPE = shape_of(
    {"hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32, "vocab_size": 32768}, parameters=2**28
)
"""2**28 numbers in float32 are 1,024 MB, half of them the embedding; so are a rank's piece, its gradients and its
moments together."""


def refusal(
    *, ranks: list, generators: list, settings: tuple[str, ...] = (), transport: str = "shared_memory"
) -> str | None:
    config = config_from_dict(RECIPE, where="test", overrides=settings)
    try:
        require_memory(config, SHAPE, ranks, generators, transport)
    except ConfigError as error:
        return str(error)
    return None


def test_a_node_is_refused_if_it_has_less_than_its_roles_hold(ray_here):
    """4 ranks of 1,024 MB, a generator of 1,024 + 1,000, and 1,024 on their way on one node; a generator on another."""
    learner, other = (
        replace(here(), node=name, node_id=name, free_mb=mb) for name, mb in (("a", 7144.0), ("b", 3048.0))
    )
    assert refusal(ranks=[learner] * 4, generators=[learner, other]) is None
    short = replace(learner, free_mb=7143.0)
    said = refusal(ranks=[short] * 4, generators=[short, other])
    assert said.startswith(
        "node a has 7,143 MB free and is to hold 4 x rank of the learner and 1 x generator, which need 7,144 MB"
    )
    assert "learner.offload" in said and "generator.kv_memory_mb" in said and "node b" not in said
    assert refusal(ranks=[replace(short, free_mb=None)] * 4, generators=[other]) is None  # it does not say
    assert refusal(ranks=[learner] * 4, generators=[other], transport="broadcast") is None
    by_broadcast = refusal(ranks=[learner] * 4, generators=[other] * 2, transport="broadcast")
    assert "node b" in by_broadcast and "2 x generator, which need 6,096 MB" in by_broadcast


def test_roles_that_take_turns_need_less_together(ray_here):
    """Two ranks without pieces: 1,024 MB of weights, as much of gradients, twice as much of moments; generation has
    1,000 of keys and values while there are no gradients."""
    node = replace(here(), node="a", node_id="a", free_mb=2 * (4096.0 + 1024.0) + 1024.0)
    of = {"ranks": [node] * 2, "generators": [node] * 2}
    settings = ("learner.ranks=2", "learner.replicas=2", "learner.streaming=false")
    assert refusal(**of, settings=(*settings, "runtime.placement=colocated")) is None
    assert "need 13,264 MB" in refusal(**of, settings=settings)


def test_ranks_need_what_they_hold_and_no_whole_model_before(ray_here):
    """16 ranks hold 256 MB each in the end; they load 64, by way of 32 of the embedding."""
    node = replace(here(), node="a", node_id="a", free_mb=16 * 256.0)
    elsewhere = [replace(node, node_id="b", free_mb=1e6)]
    settings = ("learner.ranks=16",)
    assert refusal(ranks=[node] * 16, generators=elsewhere, settings=settings) is None
    short = replace(node, free_mb=16 * 256.0 - 1)
    assert "need 4,096 MB" in refusal(ranks=[short] * 16, generators=elsewhere, settings=settings)


def test_what_is_on_its_way_to_gpus_must_fit_the_main_memory(ray_here):
    """A generator's whole model, 1,024 MB, and of each rank what it reads at a time, a quarter of 512."""

    def on(gpu: str, free: float):
        return replace(here(), node="a", node_id="a", free_mb=free, gpus=(gpu,), free_gpu_mb=1e6)

    enough, short = ([on(str(i), free) for i in range(5)] for free in (1536.0, 1535.0))
    assert refusal(ranks=enough[:4], generators=enough[4:]) is None
    assert "node a has 1,535 MB free" in (said := refusal(ranks=short[:4], generators=short[4:]))
    assert "need 1,536 MB" in said


def test_a_gpu_is_refused_by_name_and_shared_ones_are_added_up(ray_here):
    def on(gpu: str, free: float):
        return replace(here(), node="a", node_id="a", free_mb=1e6, gpus=(gpu,), free_gpu_mb=free)

    ranks = [on(str(i), 1024.0) for i in range(4)]
    assert refusal(ranks=ranks, generators=[on("4", 2024.0), on("5", 2024.0)]) is None
    assert "GPU 5 of node a has 2,023 MB free" in refusal(ranks=ranks, generators=[on("4", 2024.0), on("5", 2023.0)])
    assert "GPU 4 of node a has 2,024 MB free and is to hold 2 x generator" in refusal(
        ranks=ranks, generators=[on("4", 2024.0)] * 2
    )


def test_a_run_that_does_not_fit_its_nodes_ends_before_it_loads_and_leaves_nothing(ray_here, tmp_path):
    """Its machine belongs to a cluster, so that nothing is known of its memory until the actors are there."""
    import ray

    settings = [
        "learner.ranks=1",
        "generator.replicas=1",
        "generator.kv_memory_mb=1e9",
        f"runtime={{kind: ray, address: '{ray.get_runtime_context().gcs_address}', verifiers: 0}}",
        f"run.dir={tmp_path / 'run'}",
    ]
    with pytest.raises(ConfigError, match=r"node .* MB free and is to hold 1 x rank .* 1 x generator.*kv_memory_mb"):
        run_session(Session(config=config_from_dict(RECIPE, where="test", overrides=settings), say=print))
    asyncio.run(require_all_free())
