"""Loading a model directory in Hugging Face layout, and writing one.

    config.json                    what the model is (strict: models/config_reader.py)
    model.safetensors, or shards   the parameters (strict, memory-mapped: models/tensor_files.py)
    generation_config.json         sampling defaults, EOS ids                  optional
    tokenizer.json                 text <-> ids                                optional: without it, token ids only
    tokenizer_config.json          EOS token, chat template                    optional
    chat_template.jinja            chat template, wins over the one above      optional

Memory: parameters are built one at a time in a buffer of their final shape and dtype, straight from the mapped file,
and handed to the device.  On a GPU the buffer is freed again; on a CPU it becomes the parameter.  So the host never
holds a second copy of more than one parameter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from rlt_jax.chat import ChatTemplate, special_token_text
from rlt_jax.config import DTYPES, MAX_STOP_IDS
from rlt_jax.errors import CheckpointError, InvalidConfig
from rlt_jax.models.generation_config import GenerationDefaults, read_generation_config
from rlt_jax.models.hub import find_model
from rlt_jax.models.json_file import read_object, read_optional_object
from rlt_jax.models.registry import model_from_checkpoint
from rlt_jax.models.spec import LoopedModel, Params, TensorSource
from rlt_jax.models.tensor_files import DTYPES as FILE_DTYPES
from rlt_jax.models.tensor_files import PlannedTensor, TensorStore, write_tensors, write_text
from rlt_jax.text import TextTokenizer

log = logging.getLogger(__name__)

__all__ = ["GenerationDefaults", "LoadedCheckpoint", "load_checkpoint", "save_checkpoint"]

_NUMPY_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_ALIGNMENT = 64  # XLA's CPU client takes an aligned buffer as it is; an unaligned one it would copy


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedCheckpoint:
    """A model, ready to be compiled: facts, parameters on the device, and how to talk to it.

    Attributes:
        name: "bundled", the directory's name, or the repository id.
        path: the directory it was read from.
        model: pure functions and the static spec.
        params: the model's parameter pytree, on the device.
        tokenizer: None where the directory has no tokenizer.json; then only token ids work.
        chat_template: None where the directory has none.
        eos_token_ids: union of config.json's, generation_config.json's and the tokenizer's, in that order, and the ids
            of the special tokens that the model's family stops at.
        generation: sampling defaults.
        dtype: "bfloat16" or "float32".
        parameter_count, parameter_bytes: of `params`.
    """

    name: str
    path: Path
    model: LoopedModel
    params: Params
    tokenizer: TextTokenizer | None
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    dtype: str
    parameter_count: int
    parameter_bytes: int


def load_checkpoint(
    source: str | Path | None,
    *,
    dtype: str = "bfloat16",
    revision: str | None = None,
    device: jax.Device | None = None,
    progress: bool = False,
) -> LoadedCheckpoint:
    """Load a model.

    Everything small is read and checked first, so that a bad directory fails before gigabytes are moved.

    Args:
        source: None for the bundled model, a directory, or a Hugging Face repository id (downloaded once).
        dtype: what the parameters are converted to: "bfloat16" or "float32".
        revision: branch, tag or commit of a repository id; None is the pinned one where this version knows the model.
        device: where the parameters go; None is jax's default device.
        progress: show a progress bar on stderr.  The log has a line before and after in any case.

    Raises:
        CheckpointError: the model cannot be found or its files are wrong; names file, tensor or field.
        InvalidConfig: an unknown dtype.
    """
    if dtype not in DTYPES:
        raise InvalidConfig(f"dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    found = find_model(source, revision=revision)
    path = found.path
    config = _read_config(path)
    store = TensorStore.open(path)
    model = _read_model(path, config, store)
    generation, generation_eos = read_generation_config(
        read_optional_object(path / "generation_config.json"), str(path / "generation_config.json")
    )
    tokenizer = _read_tokenizer(path, model.spec.vocab_size)
    tokenizer_config = read_optional_object(path / "tokenizer_config.json") or {}
    chat_template = ChatTemplate.from_directory(path, tokenizer_config)
    eos = _eos_ids(path, model, generation_eos, tokenizer, tokenizer_config)
    sources = model.sources()
    store.check(_tensor_shapes(sources), model.unused_tensors())

    def place(array: np.ndarray) -> jax.Array:
        # The buffer is ours alone and never written again, so the CPU backend may keep it instead of copying it.
        # Waiting keeps one buffer alive at a time.
        return jax.device_put(array, device, may_alias=True).block_until_ready()

    leaves = jax.tree.leaves(sources)
    size = sum(entry.end - entry.begin for entry in store.entries.values())
    log.info("loading %s: %.2f GB as %s", found.name, size / 1e9, dtype)
    began = time.perf_counter()
    with _progress_bar(found.name, store, leaves, enabled=progress) as advance:
        params = read_params(store, sources, _NUMPY_DTYPES[dtype], place, advance)
    seconds = time.perf_counter() - began
    log.info("loaded %s in %.1f s (%.2f GB/s)", found.name, seconds, size / seconds / 1e9)
    count = sum(math.prod(leaf.shape) for leaf in leaves)
    return LoadedCheckpoint(
        name=found.name,
        path=path,
        model=model,
        params=params,
        tokenizer=tokenizer,
        chat_template=chat_template,
        eos_token_ids=eos,
        generation=generation,
        dtype=dtype,
        parameter_count=count,
        parameter_bytes=count * _NUMPY_DTYPES[dtype].itemsize,
    )


def read_params(
    store: TensorStore,
    sources: Params,
    dtype: np.dtype,
    place: Callable[[np.ndarray], Any],
    advance: Callable[[TensorSource], None] = lambda source: None,
) -> Params:
    """Build the parameter pytree, one parameter at a time: join, convert, `place`.

    Args:
        store: the checkpoint's tensors, already checked against `sources`.
        sources: pytree with a TensorSource at each leaf.
        dtype: of the parameters.
        place: takes over a fresh host array (aligned, no one else holds it) and returns the leaf to keep.
        advance: called after each parameter.
    """

    def read(source: TensorSource) -> Any:
        host = _aligned_empty(source.shape, dtype)
        at = 0
        for name in source.names:
            part = store.view(name)
            rows = part.shape[0]
            np.copyto(host[at : at + rows], part, casting="unsafe")  # checked: float to float, nearest even
            at += rows
        leaf = place(host)
        advance(source)
        return leaf

    return jax.tree.map(read, sources)


def save_checkpoint(
    path: str | Path,
    model: LoopedModel,
    params: Params,
    *,
    tokenizer_json: str | None,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model directory that `load_checkpoint` and the model's own tools read; parameters keep their dtype.

    Joined parameters are split into the checkpoint's tensors again, so loading gives back the same bits.  Each file is
    replaced in one step.

    Args:
        path: directory to write; made if missing, files of an earlier save replaced.
        model: the model that `params` belong to.
        params: its parameter pytree.
        tokenizer_json: content of tokenizer.json; None writes none (one of an earlier save is removed).
        config: config.json; must describe `model`.
        generation_config: generation_config.json; None writes none (likewise).
        shard_bytes: data bytes per file, >= 1; a larger checkpoint is written as shards with an index.

    Raises:
        CheckpointError: config, tokenizer or parameters do not fit the model, or the directory cannot be written.
    """
    path = Path(path)
    if shard_bytes < 1:
        raise CheckpointError(f"shard_bytes must be >= 1, found {shard_bytes}")
    described = model_from_checkpoint(config, _tensor_shapes(model.sources()))
    if described.spec.open_ended:  # the cap is the engine's setting, not the checkpoint's
        described = described.with_max_loops(model.spec.max_loops)
    if described != model:
        raise CheckpointError(f"{path}: the config given describes another model than the parameters'")
    read_generation_config(generation_config)
    tensors = _planned_tensors(path, model, params)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors, shard_bytes)
        write_text(path / "config.json", json.dumps(dict(config), indent=2) + "\n")
        optional = {
            "tokenizer.json": tokenizer_json,
            "generation_config.json": None
            if generation_config is None
            else json.dumps(dict(generation_config), indent=2) + "\n",
        }
        for name, text in optional.items():
            if text is None:
                (path / name).unlink(missing_ok=True)
            else:
                write_text(path / name, text)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


# ---------------------------------------------------------------- loading, step by step


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.exists():
        raise CheckpointError(f"{file}: missing; a model directory needs config.json")
    config = read_object(file)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{file}: field 'model_type' must be a string, found {config.get('model_type')!r:.80}")
    return config


def _read_model(path: Path, config: Mapping[str, Any], store: TensorStore) -> LoopedModel:
    try:
        return model_from_checkpoint(config, store.entries)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_tokenizer(path: Path, vocab_size: int) -> TextTokenizer | None:
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    tokenizer = TextTokenizer.from_file(file)
    if tokenizer.max_token_id >= vocab_size:
        raise CheckpointError(
            f"{file}: largest token id must be below vocab_size={vocab_size} of config.json, "
            f"found {tokenizer.max_token_id}"
        )
    return tokenizer


def _eos_ids(
    path: Path,
    model: LoopedModel,
    generation_eos: tuple[int, ...],
    tokenizer: TextTokenizer | None,
    tokenizer_config: Mapping[str, Any],
) -> tuple[int, ...]:
    """Union in the order config, generation_config, tokenizer.

    All three are needed: of the released Ouro models config.json says 0 (end of text) and the tokenizer 2 (end of
    turn), and a chat that does not stop at 2 talks to itself.
    """
    by_file = {"config.json": model.spec.eos_token_ids, "generation_config.json": generation_eos}
    eos_token = special_token_text(tokenizer_config, "eos_token", str(path / "tokenizer_config.json"))
    if tokenizer is not None and eos_token is not None:
        token_id = tokenizer.token_to_id(eos_token)
        if token_id is None:
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'}: field 'eos_token' is {eos_token!r}, "
                "which tokenizer.json does not have"
            )
        by_file["tokenizer_config.json"] = (token_id,)
    if tokenizer is not None:
        found = map(tokenizer.token_to_id, model.spec.eos_tokens)
        by_file["tokenizer.json"] = tuple(i for i in found if i is not None and i in tokenizer.special_token_ids)
    limit = model.spec.vocab_size
    for name, ids in by_file.items():
        for i in ids:
            if i >= limit:
                raise CheckpointError(
                    f"{path / name}: field 'eos_token_id' must be below vocab_size={limit} of config.json, found {i}"
                )
    union = tuple(dict.fromkeys(i for ids in by_file.values() for i in ids))
    if len(union) > MAX_STOP_IDS:  # else every request would be refused for ids that it did not give
        raise CheckpointError(
            f"{path}: {len(union)} end ids in {', '.join(by_file)}; at most {MAX_STOP_IDS} are served"
        )
    return union


def _tensor_shapes(sources: Params) -> dict[str, tuple[int, ...]]:
    """Every checkpoint tensor of the model and its shape."""
    return {
        name: shape
        for source in jax.tree.leaves(sources)
        for name, shape in zip(source.names, source.shapes, strict=True)
    }


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


@contextlib.contextmanager
def _progress_bar(
    name: str, store: TensorStore, leaves: list[TensorSource], *, enabled: bool
) -> Iterator[Callable[[TensorSource], None]]:
    """Yield a function to call after each parameter; counts bytes of the checkpoint."""
    if not enabled:
        yield lambda source: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    def size(source: TensorSource) -> int:
        return sum(store.entries[n].end - store.entries[n].begin for n in source.names)

    columns = (
        TextColumn("loading {task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=sum(map(size, leaves)))
        yield lambda source: bar.update(task, advance=size(source))


# ---------------------------------------------------------------- saving


def _planned_tensors(path: Path, model: LoopedModel, params: Params) -> list[PlannedTensor]:
    """The checkpoint's tensors in the order of `model.sources()`, fetched from the device when they are written."""
    sources, structure = jax.tree.flatten(model.sources())
    if jax.tree.structure(params) != structure:  # type: ignore[operator]
        raise CheckpointError(f"{path}: params are not the parameter tree of model_type '{model.spec.model_type}'")
    planned: list[PlannedTensor] = []
    for source, leaf in zip(sources, jax.tree.leaves(params), strict=True):
        dtype = np.dtype(leaf.dtype)
        if leaf.shape != source.shape or dtype not in FILE_DTYPES.values():
            raise CheckpointError(
                f"{path}: parameter of {source.names[0]} must have shape {list(source.shape)} and a dtype of "
                f"{', '.join(map(str, FILE_DTYPES.values()))}, found {list(leaf.shape)} {dtype}"
            )
        at = 0
        for name, shape in zip(source.names, source.shapes, strict=True):

            def fetch(leaf: Any = leaf, begin: int = at, end: int = at + shape[0]) -> np.ndarray:
                return np.asarray(jax.device_get(leaf))[begin:end]  # jax keeps the fetched array: one fetch per leaf

            planned.append(PlannedTensor(name, dtype, shape, fetch))
            at += shape[0]
    return planned
