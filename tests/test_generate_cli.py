"""`python -m rlt_jax.generate`: the scriptable surface.

PROTECTS: options keep their meaning, results come in the order of the prompts and alone on stdout, and whatever is
wrong is one line on stderr that names the option, the value and the limit, with exit code 2 and no traceback.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlt_jax.llm
from rlt_jax import __version__, cli, generate
from rlt_jax.config import EngineConfig
from rlt_jax.exits import DEFAULT_THRESHOLDS, POLICY_NAMES
from rlt_jax.llm import LLM
from rlt_jax.request import SamplingParams
from tests.conftest import fixture_dir
from tests.server.running import RunningServer, engine_maker, tiny_config
from tests.server.scripted_model import expected_text, write_scripted_model

MODEL = fixture_dir("ouro_tiny")
TINY = ["--model", str(MODEL), "--dtype", "float32", "--slots", "2", "--max-context", "512"]


# -- options only -----------------------------------------------------------------------------------------------------


def params(*arguments: str, prompts: int = 1) -> list[SamplingParams]:
    return generate._params(generate.build_parser().parse_args(arguments), prompts)


def test_prompts_of_both_kinds_keep_their_order() -> None:
    options = generate.build_parser().parse_args(
        ["--prompt", "a", "--prompt-ids", "1,2", "--seed", "3", "--prompt", "b", "--prompt-ids=4"]
    )
    assert options.prompts == ["a", (1, 2), "b", (4,)]


def test_values_may_begin_with_a_dash() -> None:
    options = generate.build_parser().parse_args(["--prompt", "--seed", "--prompt-ids", "-1,2", "--stop", "-"])
    assert (options.prompts, options.stop, options.seed) == (["--seed", (-1, 2)], ["-"], None)
    assert str(generate.build_parser().parse_args(["--temperature", "-inf"]).temperature) == "-inf"


def test_every_option_reaches_its_parameter() -> None:
    given = {
        "max_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 2**64 - 1,
        "stop_token_ids": (4, 5), "min_loops": 1, "max_loops": 3, "prefill_loops": 2, "exit_policy": "gate",
        "exit_threshold": 0.75, "initial_state": "random", "logprobs": "processed",
    }  # fmt: skip
    words = ["--ignore-eos", "--stop", "x", "--stop", "y"]
    for option, field in generate.PARAM_OPTIONS.items():
        if field in given:
            value = given[field]
            words += [option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    assert params(*words) == [SamplingParams(**given, ignore_eos=True, stop=("x", "y"))]
    assert set(generate.PARAM_OPTIONS.values()) == {*given, "ignore_eos", "stop"}
    assert params() == [SamplingParams()]


def test_a_trace_implies_its_length(tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    file.write_text("[[4, 1, 2], [4]]")
    trace = ["--exit-trace", str(file)]
    assert [(p.max_tokens, p.exit_trace, p.exit_policy) for p in params(*trace, prompts=2)] == [
        (3, (4, 1, 2), None),
        (1, (4,), None),
    ]
    assert [p.max_tokens for p in params(*trace, "--max-tokens", "2", prompts=2)] == [2, 2]


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        generate.build_parser().parse_args(["--max-tok", "3"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "rlt-generate: error: unrecognized arguments: --max-tok 3\n"


def test_help_names_every_option() -> None:
    text = generate.build_parser().format_help()
    stable = (
        "--model --prompt --prompt-ids --max-tokens --min-loops --max-loops --prefill-loops --exit-policy "
        "--exit-threshold --exit-trace --initial-state --kv-layout --kv-planes --depth-cap --boundary-batch --slots "
        "--page-size --prefill-chunk --dtype --temperature --top-k --top-p --min-p --seed --stop --ignore-eos --format "
        "--server"
    )
    for option in stable.split():
        assert f"{option} " in text or f"{option}\n" in text or f"[{option}]" in text, option


def test_help_says_what_a_threshold_means_to_every_policy() -> None:
    (words,) = [a.help for a in generate.build_parser()._actions if a.option_strings == ["--exit-threshold"]]
    for policy in set(POLICY_NAMES) - {"fixed", "trace"}:
        assert re.search(rf"\b{policy}\b", words), policy
    assert re.findall(r"\(default: ([\d., ]+)\)", words) == ["0.03, 0.001", "5"]
    assert DEFAULT_THRESHOLDS == {"latent": 0.03, "kl": 0.001, "argmax": 5.0}
    (words,) = [a.help for a in generate.build_parser()._actions if a.option_strings == ["--exit-policy"]]
    for policy in POLICY_NAMES:
        assert re.search(rf"\b{policy}\b", words), policy


def test_a_requests_bound_and_the_engines_cap_are_two_options() -> None:
    options = generate.build_parser().parse_args(["--max-loops", "3", "--depth-cap", "6"])
    assert generate._params(options, 1) == [SamplingParams(max_loops=3)]
    assert cli.engine_config(options) == EngineConfig(max_loops=6)
    assert params("--depth-cap", "6") == [SamplingParams()]


# -- in this process, with one engine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM(MODEL, tiny_config(max_waiting=None)) as llm:
        yield llm


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tiny: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command with an engine that is already compiled: exit code, stdout, stderr."""

    class Shared:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> LLM:
            return tiny

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(rlt_jax.llm, "LLM", Shared)

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = generate.main(arguments)
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def rows(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_jsonl_in_input_order(run: Run, tiny: LLM) -> None:
    prompts = [(5, 9), (1, 2, 3), (7,)]
    words = [word for prompt in prompts for word in ("--prompt-ids", ",".join(map(str, prompt)))]
    code, out, err = run(
        *words, "--max-tokens", "12", "--exit-threshold", "0.5", "--min-loops", "1", "--format", "jsonl"
    )
    assert (code, err) == (0, "")
    expected = tiny.generate(prompts, SamplingParams(max_tokens=12, exit_threshold=0.5, min_loops=1))
    for row, prompt, completion in zip(rows(out), prompts, expected, strict=True):
        assert tuple(row["prompt_token_ids"]) == prompt
        assert tuple(row["token_ids"]) == completion.token_ids
        assert tuple(row["exit_depths"]) == completion.exit_depths
        assert row["exit_depths"][0] == 4
        assert tuple(row["logprobs"]) == completion.logprobs
        assert row["text"] is None
        assert row["finish_reason"] == completion.finish_reason.value
        assert row["usage"]["completion_tokens"] == len(completion.token_ids)


def test_text_of_a_model_without_tokenizer_is_its_ids(run: Run) -> None:
    code, out, _ = run("--prompt-ids", "5,9", "--max-tokens", "3", "--prompt-ids", "1", "--ignore-eos")
    assert code == 0
    assert [len(line.split(",")) for line in out.splitlines()] == [3, 3]


def test_fixture_tokens_through_the_command(run: Run) -> None:
    golden, derived = np.load(MODEL / "golden.npz"), np.load(MODEL / "derived.npz")
    words = [w for row in golden["input_ids"] for w in ("--prompt-ids", ",".join(map(str, row)))]
    adaptive = [
        "--max-tokens",
        "16",
        "--ignore-eos",
        "--min-loops",
        "1",
        "--exit-threshold",
        "0.5",
        "--format",
        "jsonl",
    ]
    code, out, _ = run(*words, *adaptive)
    assert code == 0
    assert [row["token_ids"] for row in rows(out)] == derived["adaptive_last_exited_thr0.5_ids"].tolist()
    steps = derived["adaptive_last_exited_thr0.5_exit_steps"] + 1
    assert [row["exit_depths"][1:] for row in rows(out)] == steps.tolist()


def test_replayed_trace(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    file.write_text("[[4, 1, 2, 3, 4], [4, 4]]")
    words = ["--prompt-ids", "5,9", "--prompt-ids", "8", "--ignore-eos", "--format", "jsonl"]
    code, out, _ = run(*words, "--exit-trace", str(file))
    assert code == 0
    assert [row["exit_depths"] for row in rows(out)] == [[4, 1, 2, 3, 4], [4, 4]]


def test_a_reported_seed_repeats(run: Run) -> None:
    words = ["--prompt-ids", "5,9", "--temperature", "1", "--format", "jsonl", "--ignore-eos"]
    (first,) = rows(run(*words)[1])
    (again,) = rows(run(*words, "--seed", str(first["seed"]))[1])
    assert again["token_ids"] == first["token_ids"]


BAD = [
    ((), "no prompt given"),
    (("--prompt-ids", ""), "--prompt-ids: is empty"),
    (("--prompt-ids", "1,x"), "--prompt-ids: must be integers separated by commas, found '1,x'"),
    (("--prompt-ids", "-1"), "--prompt-ids: token 0 is -1; the vocabulary is [0, 255]"),
    (("--prompt-ids", "1,256"), "--prompt-ids: token 1 is 256; the vocabulary is [0, 255]"),
    (("--prompt-ids", ",".join(["1"] * 513)), "--prompt-ids: has 513 tokens; the limit is max_context=512"),
    (("--prompt", ""), "--prompt: is empty"),
    (("--prompt", "text"), "--prompt: is text, but the model has no tokenizer"),
    (("--max-tokens", "0"), "--max-tokens: must be >= 1, found 0"),
    (("--max-tokens", "1.5"), "--max-tokens: must be an integer, found '1.5'"),
    (("--max-tokens", "513"), "--max-tokens: 513 with a prompt of 2 needs 514 positions"),
    (("--temperature", "nan"), "--temperature: must be finite, found nan"),
    (("--temperature", "inf"), "--temperature: must be finite, found inf"),
    (("--temperature", "-1"), "--temperature: must be in [0, 3.4e+38], found -1.0"),
    (("--temperature", "hot"), "--temperature: must be a number, found 'hot'"),
    (("--exit-threshold", "nan"), "--exit-threshold: must be finite, found nan"),
    (("--exit-threshold", "-inf"), "--exit-threshold: must be finite, found -inf"),
    (("--top-p", "0"), "--top-p: must be in (0, 1], found 0.0"),
    (("--min-p", "1.1"), "--min-p: must be in [0, 1], found 1.1"),
    (("--top-k", "-1"), "--top-k: must be in [0, 2147483647], found -1"),
    (("--seed", "-1"), "--seed: must be in [0, 18446744073709551615], found -1"),
    (("--seed", str(2**64)), "found 18446744073709551616"),
    (("--min-loops", "3", "--max-loops", "2"), "--min-loops: must be at most max_loops=2, found 3"),
    (("--max-loops", "5"), "--max-loops: must be in [1, 4], found 5"),
    (("--prefill-loops", "0"), "--prefill-loops: must be in [1, 4], found 0"),
    (("--exit-policy", "never"), "--exit-policy: must be one of fixed, gate"),
    (("--exit-policy", "trace"), "--exit-trace: exit_policy 'trace' needs one depth per output"),
    (("--logprobs", "best"), "--logprobs: must be 'raw' or 'processed', found 'best'"),
    (("--stop", "x"), "--stop: 1 stop strings given, but the model has no tokenizer"),
    (("--stop-token-ids", ",".join(map(str, range(1, 18)))), "--stop-token-ids: has 17 ids"),
    (("--slots", "0"), "--slots: must be an integer in [1, 4096], found 0"),
    (("--kv-layout", "disc"), "--kv-layout: must be one of last_exited, shared, drop, ring, found 'disc'"),
    (("--format", "xml"), "--format: invalid choice: 'xml'"),
    (("--prompt-ids",), "--prompt-ids: expected one argument"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(a)[:40] for a, _ in BAD])
def test_bad_input(run: Run, tiny: LLM, arguments: tuple[str, ...], words: str) -> None:
    rounds = tiny.engine.stats()["rounds"]
    if arguments and not arguments[0].startswith("--prompt"):
        arguments = ("--prompt-ids", "1,2", *arguments)
    code, out, err = run(*arguments)
    (line,) = err.splitlines()
    assert (code, out) == (2, "")
    assert line.startswith("rlt-generate: error: ")
    assert words in line
    assert tiny.engine.stats()["rounds"] == rounds


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[[4, 1]", "is not JSON"),
        ("[4, 1]", "must hold a list of lists of depths"),
        ("{}", "must hold a list of lists of depths"),
        ("[[4], [4]]", "has 2 lists for 1 prompts"),
        ("[[]]", "list 0 is empty"),
        ("[[4, true]]", "entry 1 must be an integer >= 1, found True"),
        ("[[4, 2.0]]", "entry 1 must be an integer >= 1, found 2.0"),
        ("[[2, 2]]", "entry 0 is 2; the first output comes from prefill_loops=4"),
        ("[[4, 5]]", "entry 1 is 5; allowed is [1, 4]"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_bad_trace_files(run: Run, tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "traces.json"
    if content is not None:
        file.write_text(content)
    code, out, err = run("--prompt-ids", "1,2", "--exit-trace", str(file))
    (line,) = err.splitlines()
    assert (code, out) == (2, "")
    assert line.startswith("rlt-generate: error: --exit-trace: ")
    assert words in line


def test_a_trace_shorter_than_max_tokens_or_with_another_policy(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    file.write_text("[[4, 1]]")
    trace = ("--prompt-ids", "1,2", "--exit-trace", str(file))
    assert "has 2 entries; max_tokens=3 needs one each" in run(*trace, "--max-tokens", "3")[2]
    assert "must be 'trace' when exit_trace is given" in run(*trace, "--exit-policy", "gate")[2]


# -- through a server -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_scripted_model(tmp_path_factory.mktemp("scripted"))
    with RunningServer(engine_maker(model, tiny_config())) as running:
        yield running


def test_through_a_server(run: Run, scripted: RunningServer) -> None:
    # seven at once on two slots with two places to wait: the command asks again when the server is full
    words = ["--prompt", "xa", "--prompt-ids", "1", "--prompt", "ya"] + ["--prompt", "xa"] * 4
    code, out, err = run("--server", scripted.address, *words, "--max-tokens", "20", "--format", "jsonl", "--seed", "7")
    assert (code, err) == (0, "")
    results = rows(out)
    assert [r["text"] for r in results if r["prompt_token_ids"] != [1]] == [expected_text("a", 20)] * 6
    assert results[1]["prompt_token_ids"] == [1]
    assert results[0]["prompt_token_ids"] == scripted.engine.loaded.tokenizer.encode("xa")
    assert {r["seed"] for r in results} == {7}
    code, out, _ = run("--server", scripted.address, "--prompt", "xa", "--stop", "😀")
    assert (code, out) == (0, "→é日\n")
    scripted.wait_drained()


def test_bad_input_through_a_server(run: Run, scripted: RunningServer) -> None:
    server = ("--server", scripted.address, "--prompt", "xa")
    for arguments, words in [
        (("--top-p", "0"), "--top-p: must be in (0, 1], found 0.0"),
        (("--seed", "-1"), "--seed: must be an integer in [0, 18446744073709551615], found -1"),
        (("--stop", ""), "--stop: "),
        (("--slots", "4"), "--slots is fixed when a server starts; it cannot be given with --server"),
        (("--depth-cap", "4"), "--depth-cap is fixed when a server starts; it cannot be given with --server"),
        (("--model", "x"), "--model is fixed when a server starts"),
    ]:
        code, out, err = run(*server, *arguments)
        (line,) = err.splitlines()
        assert (code, out) == (2, "")
        assert words in line
    scripted.wait_drained()


@pytest.mark.parametrize("address", ["127.0.0.1", "http://127.0.0.1:50051"])
def test_a_wrong_address_is_exit_code_2(run: Run, address: str) -> None:
    code, out, err = run("--server", address, "--prompt", "x")
    assert (code, out) == (2, "")
    assert err == f"rlt-generate: error: --server: expected HOST:PORT, found {address!r}\n"


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"rlt-generate {__version__}\n", "")


def test_an_unreachable_server_is_exit_code_1(run: Run) -> None:
    code, out, err = run("--server", "127.0.0.1:1", "--prompt", "x")
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert "UNAVAILABLE" in line


# -- as a process -----------------------------------------------------------------------------------------------------


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlt_jax.generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("layout", ["last_exited", "shared"])
def test_the_real_command(layout: str) -> None:
    golden, derived = np.load(MODEL / "golden.npz"), np.load(MODEL / "derived.npz")
    prompt = ",".join(map(str, golden["input_ids"][1]))
    words = [
        "--prompt-ids",
        prompt,
        "--max-tokens",
        "16",
        "--ignore-eos",
        "--min-loops",
        "1",
        "--exit-threshold",
        "0.5",
    ]
    done = process(
        *TINY, *words, "--kv-layout", layout, "--page-size", "8", "--prefill-chunk", "8", "--format", "jsonl"
    )
    assert done.returncode == 0, done.stderr
    (row,) = rows(done.stdout)
    assert row["token_ids"] == derived[f"adaptive_{layout}_thr0.5_ids"][1].tolist()


def test_the_real_command_has_no_traceback(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    for arguments in (["--model", str(tmp_path)], [*TINY, "--max-tokens", "0"], ["--model", "/nowhere/at/all"]):
        done = process("--prompt-ids", "1,2", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("rlt-generate: error: ")
