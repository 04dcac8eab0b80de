"""From the first byte to the exit code: loading, health, draining, a broken device, wrong options.

PROTECTS: whoever watches the server (a supervisor, a load balancer, a script) learns the truth in time, and no stream
is left without an end.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rlt_jax.client import GenerationClient, ServerError
from rlt_jax.demo import LISTENING
from rlt_jax.errors import CheckpointError
from rlt_jax.request import SamplingParams
from rlt_jax.runtime.engine import LLMEngine
from server.app import LISTENING as SERVER_LISTENING
from server.app import pool_warning
from tests.conftest import fixture_dir
from tests.server.running import (
    PATIENCE_SECONDS,
    START_SECONDS,
    RunningServer,
    break_device,
    engine_maker,
    raw_channel,
    tiny_config,
)

MODEL = fixture_dir("ouro_tiny")
PROMPT = (5, 9, 200, 31)
LONG = SamplingParams(max_tokens=480, ignore_eos=True)
Health = health_pb2.HealthCheckResponse


class Process:
    """A server process and the lines it prints."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._out: queue.Queue[str] = queue.Queue()
        self.stderr: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self._out.put), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.stderr.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: Any, put: Any) -> None:
        for line in stream:
            put(line.rstrip("\n"))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_SECONDS)

    def address(self) -> str:
        line = self._out.get(timeout=START_SECONDS)
        assert line.startswith("rlt-server listening on 127.0.0.1:"), line
        return line.split()[-1]

    def wait_log(self, words: str) -> None:
        """Wait for a line of the log."""
        deadline = time.monotonic() + START_SECONDS
        while not any(words in line for line in list(self.stderr)):
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.01)

    def wait(self) -> int:
        code = self.process.wait(PATIENCE_SECONDS)
        for reader in self._readers:
            reader.join(PATIENCE_SECONDS)
        return code


@pytest.fixture
def process() -> Iterator[Process]:
    options = ["--dtype", "float32", "--slots", "2", "--max-context", "512"]
    with Process("-m", "server", "--model", str(MODEL), "--port", "0", "--drain-seconds", "20", *options) as process:
        yield process


def test_the_demo_waits_for_the_line_the_server_prints() -> None:
    assert LISTENING.rstrip() == SERVER_LISTENING


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(process: Process, number: signal.Signals) -> None:
    with GenerationClient(process.address()) as client:
        stream = client.generate(PROMPT, LONG)
        next(stream)
        os.kill(process.process.pid, number)
        assert len(stream.completion().token_ids) == 480  # what ran goes on to its end
    assert process.wait() == 0
    log = "\n".join(process.stderr)
    assert "paged_attention: reference" in log
    assert "memory plan" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)] * 2,
)
def test_a_second_signal_ends_the_process_at_once(first: signal.Signals, second: signal.Signals) -> None:
    # PROTECTS: unwinding the engine's thread inside a round is an abort of the whole process (exit code 134).
    options = ["--dtype", "float32", "--slots", "2", "--max-context", "512", "--round-ticks", "64"]
    with Process("-m", "server", "--model", str(MODEL), "--port", "0", "--drain-seconds", "20", *options) as process:  # noqa: SIM117
        with GenerationClient(process.address()) as client:
            running = client.generate(PROMPT, LONG)
            next(running)
            waiting = [client.generate(PROMPT, LONG) for _ in range(60)]  # seconds of work on two slots
            os.kill(process.process.pid, first)
            process.wait_log(f"{first.name} received; draining for at most 20 s")
            start = time.monotonic()
            os.kill(process.process.pid, second)
            assert process.wait() == 128 + second
            assert time.monotonic() - start < 5
            codes = []
            for stream in waiting:
                try:
                    stream.completion()
                except ServerError as error:
                    codes.append(error.code)
            assert codes  # some were cut
            assert set(codes) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    log = "\n".join(process.stderr)
    assert f"WARNING server.app: second signal ({second.name}); leaving at once" in log
    for words in ("Traceback", "terminate called", "FATAL"):
        assert words not in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_the_process_at_once(number: signal.Signals) -> None:
    with Process("-m", "server", "--model", str(MODEL), "--port", "0", "--dtype", "float32") as process:
        process.wait_log("loading the model")
        time.sleep(0.5)  # into jax's import or a compilation
        start = time.monotonic()
        os.kill(process.process.pid, number)
        assert process.wait() == 0
        assert time.monotonic() - start < 3
    log = "\n".join(process.stderr)
    assert f"{number.name} received; stopped while loading" in log
    assert "Traceback" not in log


def test_the_log_has_no_noise_and_warns_of_a_small_pool() -> None:
    options = ["--dtype", "float32", "--slots", "2", "--max-context", "512", "--page-size", "8", "--kv-pages", "6"]
    with Process("-m", "server", "--model", str(MODEL), "--port", "0", *options) as process:
        process.address()
        os.kill(process.process.pid, signal.SIGTERM)
        assert process.wait() == 0
    assert not [line for line in process.stderr if " INFO jax" in line or "Unable to initialize" in line]
    (warning,) = [line for line in process.stderr if " WARNING " in line]
    assert "the whole KV pool holds 48 positions, less than max_context=512" in warning


def test_pool_warning() -> None:
    assert pool_warning(512, 512) is None
    small, tiny = pool_warning(511, 512), pool_warning(63, 512)
    assert small is not None
    assert tiny is not None
    assert "holds 511 positions, less than max_context=512" in small
    assert "default" not in small
    assert "at most 63 together, so none with the default max_tokens=64 does" in tiny


def test_draining_refuses_new_requests_and_ends_late_ones() -> None:
    with RunningServer(engine_maker(MODEL, tiny_config()), drain_seconds=0.2) as running:
        slow_down(running.engine)
        with GenerationClient(running.address) as client, raw_channel(running.address) as channel:
            stream = client.generate(PROMPT, LONG)
            next(stream)
            assert statuses(channel) == [Health.SERVING, Health.SERVING]
            drained = threading.Thread(target=lambda: running.call(running.server.drain()))
            drained.start()
            wait_for(lambda: statuses(channel) == [Health.NOT_SERVING, Health.NOT_SERVING])
            with pytest.raises(ServerError, match="UNAVAILABLE: the server is shutting down"):
                client.complete(PROMPT, LONG)
            with pytest.raises(ServerError, match="UNAVAILABLE: the server is shutting down"):
                stream.completion()
            drained.join(PATIENCE_SECONDS)
            running.wait_drained()


def slow_down(engine: LLMEngine) -> None:
    """At least 50 ms per step, as a large model would take."""
    step = engine.step

    def slow_step() -> Any:
        time.sleep(0.05)
        return step()

    engine.step = slow_step  # type: ignore[method-assign]


def statuses(channel: grpc.Channel) -> list[int]:
    stub = health_pb2_grpc.HealthStub(channel)
    names = ("", "rlt.v1.GenerationService")
    return [stub.Check(health_pb2.HealthCheckRequest(service=name)).status for name in names]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_loading_is_unavailable_then_serving() -> None:
    release = threading.Event()

    def make_engine() -> LLMEngine:
        assert release.wait(PATIENCE_SECONDS)
        return LLMEngine(MODEL, tiny_config())

    with RunningServer(make_engine, wait=False) as running:  # noqa: SIM117  (one line would be too long)
        with GenerationClient(running.address) as client, raw_channel(running.address) as channel:
            assert statuses(channel) == [Health.NOT_SERVING, Health.NOT_SERVING]
            assert not client.is_serving()
            for call in (lambda: client.complete(PROMPT, LONG), client.model_info, client.server_info):
                with pytest.raises(ServerError, match="the model is loading") as caught:
                    call()
                assert caught.value.code is grpc.StatusCode.UNAVAILABLE
                assert caught.value.retry_after_seconds == 1
            with pytest.raises(ServerError, match="is not serving after"):
                client.wait_until_serving(0.2)
            release.set()
            running.wait_ready()
            client.wait_until_serving(PATIENCE_SECONDS)
            assert statuses(channel) == [Health.SERVING, Health.SERVING]
            assert client.complete(PROMPT, SamplingParams(max_tokens=2)).token_ids


def test_a_model_that_does_not_load_is_reported() -> None:
    with RunningServer(engine_maker(MODEL / "nothing", tiny_config()), wait=False) as running:
        with pytest.raises(CheckpointError, match="nothing"):
            running.wait_ready()
        with GenerationClient(running.address) as client:
            assert not client.is_serving()
            with pytest.raises(ServerError, match="could not be loaded"):
                client.complete(PROMPT)


# -- a device that fails ----------------------------------------------------------------------------------------------


def test_one_device_failure_ends_running_requests_only() -> None:
    short = SamplingParams(max_tokens=100, ignore_eos=True)
    with RunningServer(engine_maker(MODEL, tiny_config())) as running, GenerationClient(running.address) as client:
        expected = client.complete(PROMPT, short)
        slow_down(running.engine)
        break_device(running.engine, good_rounds=3, failures=1)
        streams = [client.generate(PROMPT, short) for _ in range(3)]  # two slots: the third waits
        ends: list[str] = []
        for stream in streams:
            try:
                ends.append("whole" if stream.completion().token_ids == expected.token_ids else "wrong")
            except ServerError as error:
                assert error.code is grpc.StatusCode.INTERNAL
                assert "planted device failure" in str(error)
                ends.append("failed")
        assert ends == ["failed", "failed", "whole"]
        assert running.wait_drained()["resets"] == 1
        assert client.is_serving()


def test_a_broken_device_ends_every_stream_and_the_process() -> None:
    with Process("-m", "tests.server.broken_server", str(MODEL)) as process:
        with GenerationClient(process.address()) as client:
            # two slots: two fail per device failure, the third failure in a row ends it with two still waiting
            streams = [client.generate(PROMPT, LONG) for _ in range(8)]
            reasons = []
            for stream in streams:
                with pytest.raises(ServerError) as caught:
                    stream.completion()
                assert caught.value.code is grpc.StatusCode.INTERNAL
                reasons.append(str(caught.value))
            assert sum("the device did not recover" in reason for reason in reasons) == 2
            wait_for(lambda: not client.is_serving())
        assert process.wait() == 1


# -- wrong options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--slots", "0"], "--slots: must be an integer in [1, 4096], found 0"),
        (["--slots", "many"], "--slots: must be an integer, found 'many'"),
        (["--page-size", "0"], "--page-size: must be an integer in [1, 1024], found 0"),
        (["--max-context", "100000"], "--max-context: 100000 exceeds the model's max_position_embeddings="),
        (["--port", "70000"], "--port: must be in [0, 65535], found 70000"),
        (["--dtype", "int4"], "--dtype: must be one of bfloat16, float32, found 'int4'"),
        (["--kv-layout", "disc"], "--kv-layout: must be one of last_exited, shared, drop, ring, found 'disc'"),
        (["--kv-planes", "2"], "--kv-planes: 2 is a setting of --kv-layout=ring"),
        (["--kv-layout", "ring", "--kv-planes", "5"], "--kv-planes: must be in [1, 4] with --depth-cap=4, found 5"),
        (["--depth-cap", "5"], "--depth-cap: must be 4, the only cap of model_type 'ouro', found 5"),
        (["--initial-state", "zeros"], "--initial-state: 'zeros', but the model offers injected"),
        (["--boundary-batch", "0"], "--boundary-batch: must be an integer in [1, 4096], found 0"),
        (["--drain-seconds", "nan"], "--drain-seconds: must be finite and >= 0, found nan"),
        (["--tls-cert", "x.pem"], "--tls-cert and --tls-key must be given together"),
        (["--tls-cert", "x.pem", "--tls-key", "y.pem"], "No such file"),
        (["--model", "/nowhere/at/all"], "no such directory"),
        (["--sl", "2"], "unrecognized arguments: --sl 2"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(options: list[str], words: str) -> None:
    command = [sys.executable, "-m", "server", "--port", "0", "--log-level", "error", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("rlt-server: error: ")
    assert words in line


def test_a_taken_port_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "server", "--port", str(port), "--model", str(MODEL)]
        done = subprocess.run([*command, "--log-level", "error"], capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"rlt-server: error: 127.0.0.1:{port}: address already in use"
    assert "Traceback" not in done.stderr


def test_tls(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    made = subprocess.run([*command.split(), "-keyout", str(key), "-out", str(cert)], capture_output=True, timeout=60)
    if made.returncode != 0:
        pytest.skip("openssl cannot make a certificate here")
    with RunningServer(engine_maker(MODEL, tiny_config()), tls_cert=cert, tls_key=key) as running:
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        with GenerationClient(running.address, credentials=credentials) as client:
            assert client.complete(PROMPT, SamplingParams(max_tokens=2)).token_ids
        with GenerationClient(running.address) as plain, pytest.raises(ServerError, match="UNAVAILABLE"):
            plain.complete(PROMPT, timeout_seconds=5)
