"""gRPC options and the command line's own table of defaults.

PROTECTS: gRPC ignores an option it does not know without a word, so a misspelt one is a setting that is not made.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc._cython
import pytest

from rlt_jax import __version__, cli
from rlt_jax.client import AsyncGenerationClient, GenerationClient
from rlt_jax.client.client import CHANNEL_OPTIONS, LOOPBACK_OPTIONS, channel_options, check_address, is_loopback
from rlt_jax.config import PLATFORM_DEFAULTS, EngineConfig, KVLayoutKind
from rlt_jax.errors import InvalidConfig
from server.__main__ import DEFAULT_MAX_WAITING, OPTIONS, build_parser, main
from server.app import SERVER_OPTIONS, ServerConfig

# As gRPC's channel_arg_names.h spells them.
KNOWN = {
    "grpc.max_receive_message_length",
    "grpc.max_send_message_length",
    "grpc.keepalive_time_ms",
    "grpc.keepalive_timeout_ms",
    "grpc.keepalive_permit_without_calls",
    "grpc.http2.min_ping_interval_without_data_ms",
    "grpc.so_reuseport",
    "grpc.enable_http_proxy",
}


@pytest.fixture(scope="module")
def core() -> bytes:
    """gRPC's own binary, which holds the name of every option it reads."""
    (library,) = Path(next(iter(grpc._cython.__path__))).glob("cygrpc*.so")
    return library.read_bytes()


@pytest.mark.parametrize("options", [SERVER_OPTIONS, CHANNEL_OPTIONS + LOOPBACK_OPTIONS], ids=["server", "client"])
def test_grpc_knows_every_option(options: tuple[tuple[str, int], ...], core: bytes) -> None:
    names = [name for name, _ in options]
    assert len(set(names)) == len(names)
    assert set(names) <= KNOWN
    for name in names:
        assert name.encode() + b"\0" in core, name
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in core  # a popular misspelling


def test_both_sides_take_messages_of_one_size() -> None:
    server, client = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)
    assert server["grpc.max_receive_message_length"] == client["grpc.max_send_message_length"] == 16 << 20


def test_defaults_are_the_configs_own() -> None:
    options = build_parser().parse_args([])
    assert cli.engine_config(options, max_waiting=options.max_waiting) == EngineConfig(max_waiting=DEFAULT_MAX_WAITING)
    config = ServerConfig()
    assert (options.host, options.port) == (config.host, config.port) == ("127.0.0.1", 50051)
    assert options.stream_buffer_tokens == config.stream_buffer_tokens
    assert options.drain_seconds == config.drain_seconds


def test_every_setting_of_a_message_has_its_option() -> None:
    options = {action.dest: action.option_strings[0] for action in build_parser()._actions}
    fields = {field.name for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)}
    own = fields - {"compilation_cache", "max_loops"} | {"model", "revision"}
    assert {name: option for option, name in OPTIONS.items()} == {name: options[name] for name in own} | {
        "max_loops": "--depth-cap"  # --max-loops is a request's
    }


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("page_size must be >= 1", "--page-size: must be >= 1"),
        ("slots=8 at max_context=64: lower slots", "--slots: 8 at --max-context=64: lower slots"),
        ("tls_cert and tls_key must be given together", "--tls-cert and --tls-key must be given together"),
        ("max_context=9 exceeds max_position_embeddings=8", "--max-context: 9 exceeds max_position_embeddings=8"),
        ("host and port", "host and port"),
        ("max_loops must be >= 1, found 0", "--depth-cap: must be >= 1, found 0"),
        ("kv_planes=2 is of kv_layout=ring", "--kv-planes: 2 is of --kv-layout=ring"),
        ("folder /x/kv_pages/y cannot be used", "folder /x/kv_pages/y cannot be used"),
    ],
)
def test_messages_name_options(message: str, shown: str) -> None:
    assert cli.with_options(message, OPTIONS) == shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"rlt-server {__version__}\n"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:50051", "[::1]:65535", "unix:/x", "dns:///host:1"])
def test_addresses(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1", ":50051", "host:", "host:0", "host:65536", "host:http", "::1:50051", "http://127.0.0.1:50051", 5],
)
def test_wrong_addresses_are_refused_by_both_clients(address: str) -> None:
    for client in (GenerationClient, AsyncGenerationClient):
        with pytest.raises(InvalidConfig, match="address: expected HOST:PORT, found"):
            client(address)


def test_every_engine_option_reaches_its_field() -> None:
    given = {
        "dtype": "float32", "kv_layout": "ring", "kv_planes": 2, "max_loops": 6, "boundary_batch": 3, "slots": 3,
        "page_size": 8, "prefill_chunk": 32, "max_context": 100, "kv_pages": 50, "memory_fraction": 0.5,
        "round_ticks": 2, "kernels": "reference",
    }  # fmt: skip
    assert set(cli.ENGINE_OPTIONS.values()) == set(given)
    words = [word for option, field in cli.ENGINE_OPTIONS.items() for word in (option, str(given[field]))]
    config = cli.engine_config(build_parser().parse_args(words))
    assert config == EngineConfig(**given | {"kv_layout": KVLayoutKind.RING})
    # what no option sets is set by the program itself
    own = {"max_waiting", "compilation_cache", "initial_state"}
    assert {f.name for f in dataclasses.fields(EngineConfig)} - set(given) == own


def test_the_default_initial_state_is_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(config: ServerConfig, make_engine: object) -> None:
        seen.append(make_engine.__closure__)
        raise SystemExit(0)

    monkeypatch.setattr("server.__main__.run", run)
    with pytest.raises(SystemExit):
        main(["--initial-state", "random", "--depth-cap", "6", "--log-level", "error"])
    configs = [cell.cell_contents for cell in seen[0] if isinstance(cell.cell_contents, EngineConfig)]
    assert [(c.initial_state, c.max_loops, c.max_waiting) for c in configs] == [("random", 6, DEFAULT_MAX_WAITING)]


def test_help_states_defaults_for_both_platforms() -> None:
    text = " ".join(build_parser().format_help().split())
    for name in ("slots", "page_size", "prefill_chunk"):
        assert (
            f"(default: {PLATFORM_DEFAULTS['gpu'][name]} on a GPU, {PLATFORM_DEFAULTS['cpu'][name]} on a CPU)" in text
        )
    for words in ("(default: 256)", "(default: 127.0.0.1)", "rlt-server listening on HOST:PORT", "Exit codes"):
        assert words in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("stream_buffer_tokens", 0),
        ("drain_seconds", float("inf")),
        ("drain_seconds", -1.0),
    ],
)
def test_process_settings_are_checked(field: str, value: float) -> None:
    with pytest.raises(InvalidConfig, match=field):
        ServerConfig(**{field: value})


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_only_loopback_addresses_are_local(host: str, local: bool) -> None:
    assert is_loopback(host) is local


@pytest.mark.parametrize(
    ("address", "direct"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("10.0.0.1:1", False), ("unix:/x", False)],
)
def test_a_proxy_is_not_asked_for_this_machine(address: str, direct: bool) -> None:
    # PROTECTS: gRPC sends even loopback calls to the proxy that http_proxy names, unless told otherwise.
    assert (("grpc.enable_http_proxy", 0) in channel_options(address)) is direct
