"""Loading a full-size checkpoint in a fresh process: seconds, and the host memory that it takes.

The process that loads does what the server does and nothing else; this one reads its memory from outside every two
milliseconds, so that neither the interpreter's lock nor a garbage collection of the measured process hides a peak.
Anonymous memory (RssAnon) is what counts: pages of the mapped file belong to the page cache and can be dropped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from rlt_jax.bench.workload import SHAPES
from rlt_jax.errors import CheckpointError, InvalidConfig
from rlt_jax.models.registry import model_from_config
from rlt_jax.models.tensor_files import PlannedTensor, write_tensors, write_text

SAMPLE_SECONDS = 0.002
SHARD_BYTES = 5_000_000_000
_MEMORY_FIELDS = {"RssAnon": "anon", "RssShmem": "shared"}


def load(model: str, dtype: str, folder: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load `model` in a fresh process; a model of SHAPES is written to `folder` first, unless it is there already.

    Must run before this process starts JAX: both would reserve the device's memory.

    Returns:
        The row, and the facts of the process that loaded: environment, copy_tb_s, name.

    Raises:
        InvalidConfig: no folder for a model of SHAPES, one for any other, or one that holds something else.
        CheckpointError: the model cannot be loaded, or not be written.
    """
    source, written = model, False
    if model in SHAPES:
        if folder is None:
            raise InvalidConfig(f"--folder: {model} has no files of its own; name a folder for them")
        source, written = str(folder), write_checkpoint(model, folder)
    elif folder is not None:
        raise InvalidConfig(f"--folder: is for a model with random weights ({', '.join(SHAPES)}), found {model}")
    command = [sys.executable, "-m", "rlt_jax.bench.loading", source, "--dtype", dtype]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if (before := _answer(child)) is None:
            raise CheckpointError(f"{source}: the process that loads ended with code {child.wait()} before it began")
        with Sampler(child.pid) as sampler:
            child.stdin.write("go\n")
            child.stdin.flush()
            result = _answer(child)
        if result is None:
            raise CheckpointError(f"{source}: the process that loads ended with code {child.wait()}; see its message")
        child.stdin.close()
        facts = _answer(child)
        if facts is None:
            raise CheckpointError(f"{source}: the process that loaded ended with code {child.wait()} afterwards")
    in_host = result["parameter_bytes"] if facts["environment"]["platform"] == "cpu" else 0
    peak = {kind: max(size, result[kind]) for kind, size in sampler.peak.items()}
    growth = peak["anon"] - before["anon"]
    return {
        "op": "load",
        "checkpoint": Path(source).name,
        "written": written,  # just now: then the file is in the page cache
        "dtype": dtype,
        "checkpoint_bytes": result["checkpoint_bytes"],
        "parameter_bytes": result["parameter_bytes"],
        "seconds": result["seconds"],
        "gb_per_s": result["checkpoint_bytes"] / result["seconds"] / 1e9,
        "anon_reserving": before["reserving"],
        "anon_before": before["anon"],
        "anon_peak": peak["anon"],
        "anon_after": result["anon"],
        "shared_growth": peak["shared"] - before["shared"],
        "parameters_in_host_bytes": in_host,
        "ratio": (growth - in_host) / result["checkpoint_bytes"],
        "samples": sampler.count,
        "device_bytes_before": before["device_bytes"],
        "device_bytes": result["device_bytes"],
        "compiles_in_window": result["compiles"],
    }, facts


# ---------------------------------------------------------------- the checkpoint


def write_checkpoint(name: str, folder: Path) -> bool:
    """Write a model of SHAPES in BF16 with random weights and the published tensor names; no tokenizer.

    One tensor at a time is made and written.  config.json comes last, so that a folder that has it is complete.

    Returns:
        False where the folder holds that model already.

    Raises:
        InvalidConfig: the folder holds anything else.
        CheckpointError: the folder cannot be written.
    """
    config = SHAPES[name]
    file = folder / "config.json"
    try:
        if file.is_file() and _document(file) == config:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InvalidConfig(f"--folder: {folder} holds something other than {name}; name an empty folder")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error
    tensors = [
        PlannedTensor(tensor, np.dtype(ml_dtypes.bfloat16), shape, _Noise(tensor, shape))
        for source in jax.tree.leaves(model_from_config(config).sources())
        for tensor, shape in zip(source.names, source.shapes, strict=True)
    ]
    write_tensors(folder, tensors, SHARD_BYTES)
    write_text(file, json.dumps(config, indent=2) + "\n")
    return True


def _document(file: Path) -> Any:
    """What a JSON file says; None where it is no JSON."""
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True)
class _Noise:
    """Random data of one tensor, made when it is written: norm weights near 1, matrices at 1/sqrt(fan_in)."""

    name: str
    shape: tuple[int, ...]

    def __call__(self) -> np.ndarray:
        noise = np.random.default_rng(zlib.crc32(self.name.encode())).standard_normal(self.shape, np.float32)
        if len(self.shape) == 1:
            noise *= 0.1
            noise += 1.0
        else:
            noise *= 1 / math.sqrt(self.shape[-1])
        return noise.astype(ml_dtypes.bfloat16)


# ---------------------------------------------------------------- memory of a process


def memory(pid: int | str) -> dict[str, int]:
    """Bytes of a process's anonymous and shared resident memory, now.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    found = dict.fromkeys(_MEMORY_FIELDS.values(), 0)
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        field, _, value = line.partition(":")
        if field in _MEMORY_FIELDS:
            found[_MEMORY_FIELDS[field]] = int(value.split()[0]) << 10
    return found


class Sampler:
    """Reads another process's memory every SAMPLE_SECONDS in a thread; `peak` is the largest of each kind."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self.peak = memory(pid)
        self.count = 1

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            try:
                now = memory(self._pid)
            except OSError:  # it ended
                return
            self.peak = {kind: max(size, self.peak[kind]) for kind, size in now.items()}
            self.count += 1

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


# ---------------------------------------------------------------- the process that loads


def _answer(child: subprocess.Popen[str]) -> dict[str, Any] | None:
    """The child's next line; None if it ended instead."""
    assert child.stdout is not None
    line = child.stdout.readline()
    return json.loads(line) if line else None


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Start JAX, reserve the device's memory, say so and wait for a line; load as the server does and say how it went;
    then what the device is."""
    parser = argparse.ArgumentParser(prog="python -m rlt_jax.bench.loading")
    parser.add_argument("model")
    parser.add_argument("--dtype", required=True)
    args = parser.parse_args(argv)
    from rlt_jax import cli
    from rlt_jax.config import EngineConfig
    from rlt_jax.platform import claim_device, set_memory_share

    cli.log_to_stderr(logging.INFO)  # beside the bar on a terminal, and instead of it elsewhere
    set_memory_share(EngineConfig().memory_fraction)
    unreserved = memory("self")["anon"]
    device = claim_device()
    reserving = memory("self")["anon"] - unreserved
    from rlt_jax.bench.environment import copy_tb_s, environment
    from rlt_jax.bench.timeline import WATCH
    from rlt_jax.models.checkpoint import load_checkpoint

    def device_bytes() -> int | None:
        stats = device.memory_stats() if device.platform == "gpu" else None
        return stats["bytes_in_use"] if stats else None

    _say(**memory("self"), reserving=reserving, device_bytes=device_bytes())
    sys.stdin.readline()
    compiles, began = WATCH.compiles, time.perf_counter()
    try:
        loaded = load_checkpoint(args.model, dtype=args.dtype, device=device, progress=sys.stderr.isatty())
    except (CheckpointError, InvalidConfig) as error:
        cli.fail(parser.prog, error)
    seconds = time.perf_counter() - began
    _say(
        **memory("self"),
        seconds=seconds,
        checkpoint_bytes=sum(file.stat().st_size for file in loaded.path.glob("*.safetensors")),
        parameter_bytes=loaded.parameter_bytes,
        device_bytes=device_bytes(),
        compiles=WATCH.compiles - compiles,
    )
    sys.stdin.read()  # until this process's memory has been read for the last time
    _say(environment=environment(), copy_tb_s=copy_tb_s(), name=loaded.name)


if __name__ == "__main__":
    main()
