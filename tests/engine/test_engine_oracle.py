# SPDX-License-Identifier: Apache-2.0
"""The engine's logits equal the oracle's: any order, cold or warm, any slicing, any batch mates, any place of documents."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from fixtures.tiny_engine import CHUNK_METHODS, FULL_METHODS, GREEDY, drain, loaded_tiny, make_engine, prompt
from fixtures.tiny_models import tiny_model
from lazyattention.models.matrix import rows
from lazyattention.ops import LayerRotary
from oracle import TOLERANCE, ChunkOracle, LogitsRecorder, error_of

# Lengths around block sizes 4, 8 and 16: nothing, one token, exactly a block, one more, several blocks.
PROMPTS = {
    "documents before the question": "p11 d9 d16 d33 t5",
    "another order": "p11 d33 d9 d16 t5",
    "in the system message": "p11 d16 d9 t13",
    "between turns, text between": "p11 t6 d9 t7 d33 d16 t8 d1 t5",
    "the same document often": "p11 d9 d9 t4 d16 d9 t5",
    "documents after history only": "p11 t21 d16 d9 t5",
    "none, one token, exact blocks": "p16 d0 d1 d4 d8 d16 d32 d0-b t1",
    "only an empty document": "p11 d0 t5",
    "nothing before the documents": "d16 d9 d33 t5",
    "an empty preamble": "p0 d16 d9 t5",
    "a long document": "p3 d9 d130 d16 t5",
    "other instructions": "p7 d9 d16 d33 t5",
    "no documents": "t29",
    "preamble of one token": "p1 d9 t1 d16 t1-b",
}


# Its new name does not exist in the oldest transformers supported.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


@functools.cache
def oracle_of(model_type="llama", variant="default", dtype="float64", **overrides):
    model = tiny_model(model_type, variant, **overrides)
    return ChunkOracle(model.double() if dtype == "float64" else model)


@functools.cache
def wanted(oracle, layout, output_token_ids, encoding):
    return oracle.logits(layout, output_token_ids, encoding=encoding)


def errors_of(engine, oracle, prompts, *, methods=CHUNK_METHODS, encoding, waves=2):
    """Run every prompt by every method, all at once, `waves` times; return the error of each request's logits.

    The first wave is cold and mixed, the later ones find what the earlier ones left, in changing order.
    """
    recorder = LogitsRecorder(engine)
    errors = {}
    names = sorted(prompts)
    for wave in range(waves):
        order = names[wave:] + names[:wave]
        requests = {f"{wave}/{method}/{name}": (prompt(prompts[name]), method) for name in order for method in methods}
        for request_id, (layout, method) in requests.items():
            engine.add_request(request_id, layout, GREEDY, reuse_method=method)
        outputs = drain(engine)
        engine.check_idle()
        for request_id, (layout, method) in requests.items():
            token_ids = tuple(outputs[request_id].outputs[0].token_ids)
            assert len(token_ids) == GREEDY.max_tokens, outputs[request_id].error
            seen = "full" if method in FULL_METHODS else encoding
            errors[request_id] = error_of(recorder.of(request_id), wanted(oracle, layout, token_ids[:-1], seen))
    return errors


def assert_small(errors, tolerance=TOLERANCE):
    wrong = {name: error for name, error in errors.items() if not error < tolerance}
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("encoding", "max_num_batched_tokens", "block_size"),
    [("after_preamble", 2048, 8), ("isolated", 2048, 16), ("after_preamble", 7, 4), ("isolated", 3, 1)],
)
def test_every_chunk_method_gives_the_oracles_logits(encoding, max_num_batched_tokens, block_size):
    sliced = max_num_batched_tokens < 100
    some = sorted(PROMPTS)[: 3 if sliced else None]
    engine = make_engine(
        encoding=encoding,
        num_blocks=32768 // block_size,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    prompts = {name: PROMPTS[name] for name in some}
    assert_small(errors_of(engine, oracle_of(num_hidden_layers=2), prompts, encoding=encoding))
    assert engine._checksums.num_checks > 0


def test_one_token_a_step():
    """Everything in slices of one token: chunks, preamble, question."""
    engine = make_engine(max_num_batched_tokens=1)
    prompts = {"one": "p5 d9 d17 t3 d9 t2"}
    assert_small(errors_of(engine, oracle_of(num_hidden_layers=2), prompts, encoding="after_preamble"))


def test_full_recompute_and_prefix_equal_the_models_own_forward():
    engine = make_engine(num_blocks=2000)
    errors = errors_of(engine, oracle_of(num_hidden_layers=2), PROMPTS, methods=FULL_METHODS, encoding="full", waves=3)
    assert_small(errors)


def test_all_methods_share_a_batch():
    engine = make_engine(num_blocks=1000, max_num_batched_tokens=64)
    some = {name: PROMPTS[name] for name in ("another order", "the same document often", "no documents")}
    errors = errors_of(
        engine,
        oracle_of(num_hidden_layers=2),
        some,
        methods=(*CHUNK_METHODS, *FULL_METHODS),
        encoding="after_preamble",
    )
    assert_small(errors)


def test_tight_pool_gives_the_oracles_logits():
    """Chunks are evicted and sequences preempted all the time; the logits stay."""
    engine = make_engine(num_blocks=52, block_size=4, max_num_batched_tokens=16)
    some = {
        name: PROMPTS[name] for name in ("documents before the question", "another order", "the same document often")
    }
    errors = errors_of(engine, oracle_of(num_hidden_layers=2), some, encoding="after_preamble", waves=3)
    assert_small(errors)
    assert engine.cache.stats.num_evicted_chunks > 0


EXACT = [(row.model_type, row.variant) for row in rows() if row.refused is None]
# One of each kind of layer and pairing; the whole matrix is run by the slow test.
QUICK = [
    ("llama", "llama3"),
    ("llama", "yarn"),
    ("mistral", "default"),
    ("qwen3", "sliding window on some layers"),
    ("gemma2", "default"),
    ("gemma3_text", "a table per layer type"),
    ("smollm3", "some layers without RoPE"),
    ("phi3", "partial rotary"),
    ("glm4", "partial rotary"),
    ("cohere2", "full layers without RoPE"),
    ("gpt_oss", "yarn"),
]
FAMILY_PROMPTS = {"reordered": "p11 d9 d16 t7 d33 d9 t5"}


def family_errors(model_type, variant, encoding, **options):
    engine = make_engine(loaded_tiny(model_type, variant), encoding=encoding, num_blocks=1000, **options)
    return errors_of(
        engine,
        oracle_of(model_type, variant),
        FAMILY_PROMPTS,
        methods=(*CHUNK_METHODS, *FULL_METHODS),
        encoding=encoding,
    )


@pytest.mark.parametrize(("model_type", "variant"), QUICK)
def test_family_gives_the_oracles_logits(model_type, variant):
    assert_small(family_errors(model_type, variant, "after_preamble", max_num_batched_tokens=50))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["after_preamble", "isolated"])
@pytest.mark.parametrize(("model_type", "variant"), EXACT)
def test_whole_matrix_gives_the_oracles_logits(model_type, variant, encoding):
    for max_num_batched_tokens in (5, 2048):
        errors = family_errors(model_type, variant, encoding, max_num_batched_tokens=max_num_batched_tokens)
        assert_small(errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "max_num_batched_tokens", "block_size"),
    list(itertools.product(("after_preamble", "isolated"), (1, 3, 7, 64, 2048), (1, 4, 16))),
)
@pytest.mark.parametrize(("model_type", "variant"), [("llama", "default"), ("gemma3_text", "a table per layer type")])
def test_whole_cross_product_gives_the_oracles_logits(
    model_type, variant, encoding, max_num_batched_tokens, block_size
):
    engine = make_engine(
        loaded_tiny(model_type, variant, num_hidden_layers=2, **_two_layers(model_type)),
        encoding=encoding,
        num_blocks=32768 // block_size,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    oracle = oracle_of(model_type, variant, num_hidden_layers=2, **_two_layers(model_type))
    assert_small(errors_of(engine, oracle, PROMPTS, encoding=encoding))


def _two_layers(model_type):
    return {"layer_types": ("sliding_attention", "full_attention")} if model_type == "gemma3_text" else {}


class Float64Rotary(torch.nn.Module):
    """As transformers' own, but the angles are formed in float64: at 128K tokens float32 is off by 8e-3 radians."""

    def __init__(self, inv_freq):
        super().__init__()
        self.inv_freq = inv_freq

    def forward(self, x, position_ids, *unused):
        angles = position_ids[..., None].double() * self.inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@pytest.mark.parametrize("encoding", ["after_preamble", pytest.param("isolated", marks=pytest.mark.slow)])
def test_position_deltas_beyond_128k(encoding):
    """526 spans of 251 tokens, nearly all the same document, so that the last ones stand beyond 128K."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 1 << 18, "num_attention_heads": 2}
    loaded = loaded_tiny("llama", "llama3", **sizes, tie_word_embeddings=True)
    model = tiny_model("llama", "llama3", **sizes, tie_word_embeddings=True).double()
    for one in (loaded.model, model):
        one.model.rotary_emb = Float64Rotary(one.model.rotary_emb.inv_freq)
    shorthand = "p11 " + "d251 " * 526 + "d9 t6 d33 t5"
    starts = list(itertools.accumulate(len(span.token_ids) for span in prompt(shorthand).spans))
    assert starts[-5] > 1 << 17
    engine = make_engine(loaded, num_blocks=20_000, block_size=16, encoding=encoding)
    methods = ("rotate_query", "rotate_key", "copy_rotate")
    errors = errors_of(engine, ChunkOracle(model), {"far": shorthand}, methods=methods, encoding=encoding, waves=1)
    assert_small(errors)


def test_missing_turn_would_show():
    """The tolerance is tight against what it must catch: without turns every chunk method is far off."""
    loaded = loaded_tiny(num_hidden_layers=2)
    never_turned = tuple(LayerRotary(inv_freq=None, rotary_dim=0) for _ in loaded.rotaries)
    engine = make_engine(replace(loaded, rotaries=never_turned))
    errors = errors_of(
        engine,
        oracle_of(num_hidden_layers=2),
        {"one": "p11 d9 d16 d33 t5"},
        methods=("rotate_query", "copy_rotate"),
        encoding="after_preamble",
    )
    assert min(errors.values()) > 100 * TOLERANCE


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float32", TOLERANCE), ("float16", 5e-3), ("bfloat16", 5e-2)])
def test_kv_of_another_dtype_than_the_models_costs_its_rounding_only(kv_dtype, tolerance):
    """The option was accepted, and then every request failed: the CPU's attention mixed the two dtypes."""
    engine = make_engine(kv_dtype=kv_dtype)
    some = {"one": PROMPTS["documents before the question"]}
    errors = errors_of(engine, oracle_of(num_hidden_layers=2), some, encoding="after_preamble")
    assert_small(errors, tolerance)
