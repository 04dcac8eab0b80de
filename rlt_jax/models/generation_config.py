"""generation_config.json: sampling defaults and EOS ids; every other field is inert, neutral, or refused by name."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rlt_jax.errors import CheckpointError
from rlt_jax.models.config_reader import read_token_ids

FILE = "generation_config.json"

# Fields that change nothing here: bookkeeping, the caller's own limits, caches, assisted decoding (same results).
INERT = frozenset(
    {
        "_from_model_config",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "continuous_batching_config",
        "decoder_start_token_id",
        "disable_compile",
        "early_stopping",
        "generation_kwargs",
        "is_assistant",
        "length_penalty",
        "low_memory",
        "max_length",
        "max_matching_ngram_size",
        "max_new_tokens",
        "max_time",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "return_dict_in_generate",
        "return_legacy_cache",
        "target_lookbehind",
        "transformers_version",
        "trust_remote_code",
        "use_cache",
    }
)

# Fields that change what is generated and that rlt_jax does not have: only values that switch them off are accepted.
# JSON null always is one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "custom_generate": (),
    "diversity_penalty": (0, 0.0),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1, 1.0),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0, 0.0),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False, True),  # the distribution is normalised here in any case
    "repetition_penalty": (1, 1.0),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1, 1.0),
    "watermarking_config": (),
}


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """What a request gets for the sampling parameters it leaves out.

    Attributes:
        temperature: >= 0; 0 is greedy.
        top_k: >= 0; 0 is off.
        top_p: in (0, 1]; 1 is off.
        min_p: in [0, 1]; 0 is off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def read_generation_config(
    config: Mapping[str, Any] | None, where: str = FILE
) -> tuple[GenerationDefaults, tuple[int, ...]]:
    """Sampling defaults and EOS ids of a generation_config.json; None (no such file) means greedy and no ids.

    The sampling fields count when do_sample is true; those the file leaves out are then off (temperature 1), not what
    some library version would fill in.  They are checked in any case.

    Raises:
        CheckpointError: an unknown field, a value out of range, or a field that would change the output and that
            rlt_jax does not have.
    """
    if config is None:
        return GenerationDefaults(), ()
    config = {k: v for k, v in config.items() if v is not None}
    do_sample = config.get("do_sample", False)
    if not isinstance(do_sample, bool):
        raise _bad(where, "do_sample", "true or false", do_sample)
    defaults = GenerationDefaults(
        temperature=_number(
            config, where, "temperature", 1.0, "a finite number >= 0", lambda x: 0 <= x <= sys.float_info.max
        ),
        top_k=_top_k(config, where),
        top_p=_number(config, where, "top_p", 1.0, "a number in (0, 1]", lambda x: 0 < x <= 1),
        min_p=_number(config, where, "min_p", 0.0, "a number in [0, 1]", lambda x: 0 <= x <= 1),
    )
    eos = read_token_ids(config.get("eos_token_id"), f"{where}: field 'eos_token_id'")
    for field in sorted(set(config) & set(NEUTRAL)):
        value = config[field]
        if not any(type(value) is type(n) and value == n for n in NEUTRAL[field]):
            off = " or ".join(map(repr, (*NEUTRAL[field][:1], None)))
            raise CheckpointError(
                f"{where}: field '{field}' is {value!r:.80}, which rlt_jax does not support; expected {off} (off). "
                "Remove the field to serve the model without it"
            )
    known = {"do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id"} | INERT | set(NEUTRAL)
    unknown = sorted(set(config) - known)
    if unknown:
        raise CheckpointError(f"{where}: unknown field(s) {', '.join(unknown)}; it may change what is generated")
    return (defaults if do_sample else GenerationDefaults()), eos


def _bad(where: str, field: str, expected: str, found: Any) -> CheckpointError:
    return CheckpointError(f"{where}: field '{field}' must be {expected}, found {found!r:.80}")


def _number(
    config: Mapping[str, Any], where: str, field: str, default: float, expected: str, allowed: Callable[[float], bool]
) -> float:
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not allowed(value):
        raise _bad(where, field, expected, value)
    return float(value)


def _top_k(config: Mapping[str, Any], where: str) -> int:
    value = config.get("top_k", 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise _bad(where, "top_k", "an integer >= 0 (0 is off)", value)
    return value
