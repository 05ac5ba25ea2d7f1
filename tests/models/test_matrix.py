# SPDX-License-Identifier: Apache-2.0
"""Every row of the support matrix is exact against a float64 oracle, or refused with its reason.

The models run in float64, but transformers forms rotation tables, norms and its eager softmax in float32 whatever the
dtype. What is left is 2.5e-6 of the largest logit at most (measured on 5.17 and 5.24), so 2e-5 is allowed; without the
turn the smallest error is 0.28.
"""

from pathlib import Path

import pytest
import torch

from fixtures.chunk_oracle import oracle_logits, random_tokens, reuse_logits
from fixtures.tiny_models import CONFIGS, tiny_model
from lazyattention.errors import UnsupportedError
from lazyattention.models.matrix import EXACT_FAMILIES, REFUSED_FAMILIES, Row, rows, to_markdown
from lazyattention.models.probe import check_model
from lazyattention.models.rope import layer_rotaries
from lazyattention.ops import LayerRotary

TOLERANCE = 2e-5
# Window 16 of the tiny models cuts through the prompt; blocks of 8 are partly filled; one chunk stands twice.
CHUNKS = [random_tokens(num_tokens, seed) for seed, num_tokens in enumerate((9, 13, 17))]
ORDERS = [(0, 1, 2), (2, 0, 1), (1, 2, 1)]
QUESTION = random_tokens(7, seed=9)

EXACT = [row for row in rows() if row.refused is None]
REFUSED = [row for row in rows() if row.refused is not None and (row.model_type, row.variant) in CONFIGS]


def name_of(row: Row) -> str:
    return f"{row.model_type}-{row.variant}".replace(" ", "_")


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("row", EXACT, ids=name_of)
def test_reuse_equals_recomputing_under_the_chunk_mask_and_needs_the_turn(row):
    model = tiny_model(row.model_type, row.variant).double()
    rotaries = layer_rotaries(model)
    kv_shapes = check_model(model, rotaries).kv_shapes
    unturned = [LayerRotary(inv_freq=None, rotary_dim=0)] * len(rotaries)
    for order in ORDERS:
        chunks = [CHUNKS[index] for index in order]
        want = oracle_logits(model, chunks, QUESTION)
        assert error_of(reuse_logits(model, rotaries, kv_shapes, chunks, QUESTION), want) < TOLERANCE
        assert error_of(reuse_logits(model, unturned, kv_shapes, chunks, QUESTION), want) > 0.1


@pytest.mark.parametrize("row", EXACT, ids=name_of)
def test_plain_prompt_gives_the_models_own_logits(row):
    """The model builds its own mask here: a window that it applies there and does not pass on would show."""
    model = tiny_model(row.model_type, row.variant).double()
    rotaries = layer_rotaries(model)
    kv_shapes = check_model(model, rotaries).kv_shapes
    prompt = random_tokens(45, seed=3)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    assert error_of(reuse_logits(model, rotaries, kv_shapes, [], prompt), want) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("row", EXACT, ids=name_of)
def test_reuse_on_the_gpu_equals_the_cpu_oracle(row):
    """float32 kernels, products in tensor-float off by default: 2e-3 of the largest logit."""
    model = tiny_model(row.model_type, row.variant)
    chunks = [CHUNKS[index] for index in ORDERS[2]]
    want = oracle_logits(model.double(), chunks, QUESTION)
    model = tiny_model(row.model_type, row.variant).cuda()
    rotaries = layer_rotaries(model)
    kv_shapes = check_model(model, rotaries).kv_shapes
    assert error_of(reuse_logits(model, rotaries, kv_shapes, chunks, QUESTION).double().cpu(), want) < 2e-3


@pytest.mark.parametrize("row", REFUSED, ids=name_of)
def test_refused_row_names_its_reason(row):
    with pytest.raises(UnsupportedError) as error:
        layer_rotaries(tiny_model(row.model_type, row.variant))
    reason = row.refused.split(",")[0].removeprefix("layers share the KV").removeprefix("the model applies its")
    words = {word for word in reason.replace(";", " ").split() if len(word) > 4}
    said = sum(word in str(error.value) for word in words)
    assert said >= len(words) / 2, str(error.value)
    assert "lazyattention models" in str(error.value) or "choose" in str(error.value)


def test_every_exact_row_has_a_configuration_and_every_configuration_a_row():
    listed = {(row.model_type, row.variant) for row in rows()}
    assert {(row.model_type, row.variant) for row in EXACT} <= set(CONFIGS)
    assert set(CONFIGS) <= listed
    assert not set(EXACT_FAMILIES) & set(REFUSED_FAMILIES)


def test_untested_model_type_is_refused():
    model = tiny_model()
    model.config.model_type = "brand_new"
    with pytest.raises(UnsupportedError, match="'brand_new' have not been tested"):
        layer_rotaries(model)


def test_page_shows_the_matrix_as_it_is():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert to_markdown() in page, "run: python tools/docs.py"
