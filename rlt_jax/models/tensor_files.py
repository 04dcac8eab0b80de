"""Safetensors files, read strictly and without copies, and written as a stream.  No jax here.

    8 bytes      header length N, little endian
    N bytes      JSON: {name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {str: str}}
    the rest     the data; offsets count from its start and cover it exactly, without gaps or overlaps

The data is memory-mapped: pages belong to the file, the kernel may drop them again, and they do not count as anonymous
memory of this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rlt_jax.errors import CheckpointError
from rlt_jax.models.json_file import parse_object, read_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: what the header says, checked."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


class TensorFile:
    """One safetensors file, mapped read-only.  The header is checked in full when it is opened."""

    def __init__(self, path: Path) -> None:
        """Open and check.

        Raises:
            CheckpointError: the file cannot be read, is truncated, or its header is corrupt.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise CheckpointError(f"{path}: truncated: expected an 8-byte header length, found {size} bytes")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        header_bytes = int.from_bytes(self._map[:8], "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: header length {header_bytes} exceeds {_MAX_HEADER_BYTES}: not a safetensors"
            )
        if 8 + header_bytes > size:
            raise CheckpointError(f"{path}: truncated: the header needs {8 + header_bytes} bytes, the file has {size}")
        header = parse_object(self._map[8 : 8 + header_bytes], f"{path}: header")
        _check_metadata(path, header.pop("__metadata__", {}))
        self.entries = {name: _checked_entry(path, name, fields, 8 + header_bytes) for name, fields in header.items()}
        _check_cover(path, self.entries, 8 + header_bytes, size)

    def view(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file; it may be unaligned."""
        entry = self.entries[name]
        flat = np.frombuffer(self._map, np.uint8, entry.end - entry.begin, entry.begin)
        return flat.view(entry.dtype).reshape(entry.shape)


class TensorStore:
    """All tensors of a model directory: one file, or shards and their index."""

    def __init__(self, files: Mapping[str, TensorFile], where: Path) -> None:
        """Join files whose tensor names are distinct; use `open` for a directory."""
        self._files = files
        self.where = where
        self.entries: dict[str, TensorEntry] = {}
        for file in files.values():
            for name, entry in file.entries.items():
                if name in self.entries:
                    raise CheckpointError(
                        f"{where}: tensor '{name}' is in two shards: {self.entries[name].file.name}, {file.path.name}"
                    )
                self.entries[name] = entry

    @classmethod
    def open(cls, directory: Path) -> TensorStore:
        """Open a directory with exactly one of model.safetensors and model.safetensors.index.json.

        Raises:
            CheckpointError: neither or both are there, a shard is missing or corrupt, or index and shards disagree.
        """
        single, index = directory / SINGLE_FILE, directory / INDEX_FILE
        if single.exists() and index.exists():
            raise CheckpointError(f"{directory}: expected one of {SINGLE_FILE} and {INDEX_FILE}, found both")
        if single.exists():
            return cls({SINGLE_FILE: TensorFile(single)}, single)
        if index.exists():
            return cls._open_sharded(directory, index)
        raise CheckpointError(f"{directory}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither")

    @classmethod
    def _open_sharded(cls, directory: Path, index: Path) -> TensorStore:
        document = read_object(index)
        weight_map = document.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: field 'weight_map' must be a non-empty object, found {weight_map!r:.80}")
        for name, shard in weight_map.items():
            # A plain name: an index must not reach outside its directory.
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index}: tensor '{name}' must name a .safetensors file of the same directory, found {shard!r}"
                )
        files: dict[str, TensorFile] = {}
        for shard in sorted(set(weight_map.values())):
            if not (directory / shard).exists():
                raise CheckpointError(f"{index}: shard {shard} does not exist in {directory}")
            files[shard] = TensorFile(directory / shard)
        store = cls(files, index)
        for name, shard in weight_map.items():
            found = store.entries.get(name)
            if found is None or found.file.name != shard:
                at = "no shard" if found is None else found.file.name
                raise CheckpointError(f"{index}: tensor '{name}' must be in {shard}, found in {at}")
        extra = [name for name in store.entries if name not in weight_map]
        if extra:
            raise CheckpointError(
                f"{index}: {len(extra)} tensor(s) in the shards are not in 'weight_map': {first_few(extra)}"
            )
        return store

    def check(
        self, expected: Mapping[str, tuple[int, ...]], unused: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Compare with the model's tensors: all of `expected` must be there, and none but those and `unused`.

        Raises:
            CheckpointError: tensors are missing, unexpected, or of another shape; the first few are named.
        """
        missing = [name for name in expected if name not in self.entries]
        if missing:
            raise CheckpointError(
                f"{self.where}: {len(missing)} of {len(expected)} tensors are missing: {first_few(missing)}"
            )
        known = {**expected, **(unused or {})}
        unexpected = [name for name in self.entries if name not in known]
        if unexpected:
            raise CheckpointError(
                f"{self.where}: {len(unexpected)} tensor(s) that the model does not have: {first_few(unexpected)}"
            )
        for name, shape in known.items():
            entry = self.entries.get(name)
            if entry is not None and entry.shape != shape:
                raise CheckpointError(
                    f"{entry.file}: tensor '{name}' must have shape {list(shape)}, found {list(entry.shape)}"
                )

    def view(self, name: str) -> np.ndarray:
        return self._files[self.entries[name].file.name].view(name)


def first_few(names: Sequence[str], limit: int = 4) -> str:
    more = f", … ({len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: header: '__metadata__' must map strings to strings, found {metadata!r:.80}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _checked_entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    at = f"{path}: tensor '{name}'"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{at}: header entry must have dtype, shape and data_offsets, found {fields!r:.120}")
    shape, offsets = fields["shape"], fields["data_offsets"]
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{at}: dtype must be one of {', '.join(DTYPES)}, found {fields['dtype']!r:.40}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise CheckpointError(f"{at}: shape must be a list of integers >= 0, found {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise CheckpointError(f"{at}: data_offsets must be two integers >= 0, found {offsets!r:.80}")
    begin, end = offsets
    need = math.prod(shape) * dtype.itemsize
    if end - begin != need:
        raise CheckpointError(
            f"{at}: {fields['dtype']} {shape} needs {need} bytes, data_offsets [{begin}, {end}] span {end - begin}"
        )
    return TensorEntry(path, dtype, tuple(shape), data_start + begin, data_start + end)


def _check_cover(path: Path, entries: Mapping[str, TensorEntry], data_start: int, size: int) -> None:
    """The tensors must lie end to end from the start of the data to the end of the file."""
    at, last = data_start, None
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            raise CheckpointError(
                f"{path}: truncated: tensor '{name}' ends at byte {entry.end}, the file has {size} bytes"
            )
        if entry.begin < at:
            raise CheckpointError(f"{path}: tensors '{last}' and '{name}' overlap by {at - entry.begin} bytes")
        if entry.begin > at:
            raise CheckpointError(f"{path}: {entry.begin - at} bytes before tensor '{name}' belong to no tensor")
        at, last = entry.end, name
    if at != size:
        raise CheckpointError(f"{path}: {size - at} bytes at the end belong to no tensor")


# ---------------------------------------------------------------- writing


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write: its header facts now, its data when its turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    data: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(directory: Path, tensors: Sequence[PlannedTensor], shard_bytes: int) -> None:
    """Write tensors as model.safetensors, or as shards of at most `shard_bytes` of data and their index.

    Files of an earlier save are replaced one by one; the other layout's files go last.  A tensor larger than
    `shard_bytes` gets a shard of its own.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    shards: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.bytes
    if len(shards) == 1:
        names = [SINGLE_FILE]
    else:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        with replacing(directory / name) as temporary:
            _write_file(temporary, shard)
    keep = set(names)
    if len(shards) > 1:
        keep.add(INDEX_FILE)
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        document = {"metadata": {"total_size": sum(t.bytes for t in tensors)}, "weight_map": weight_map}
        write_text(directory / INDEX_FILE, json.dumps(document, indent=2, sort_keys=True) + "\n")
    for path in directory.iterdir():
        ours = path.name in (SINGLE_FILE, INDEX_FILE) or _SHARD_NAME.fullmatch(path.name)
        if ours and path.name not in keep:
            path.unlink()


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step.  Raises CheckpointError if it cannot be written."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place on success, so that no reader sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_file(path: Path, tensors: Sequence[PlannedTensor]) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers insists on
    at = 0
    for t in tensors:
        header[t.name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.bytes]}
        at += t.bytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for t in tensors:
            data = np.ascontiguousarray(t.data())
            assert data.shape == t.shape and data.dtype == t.dtype  # noqa: PT018  ours, not the user's
            file.write(data.reshape(-1).view(np.uint8).data)
