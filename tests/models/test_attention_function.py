# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from fixtures.tiny_models import tiny_model
from lazyattention import ops
from lazyattention.errors import UnsupportedError
from lazyattention.models.attention import attention_forward
from lazyattention.models.probe import check_model
from lazyattention.models.rope import layer_rotaries
from lazyattention.ops import AttentionMetadata, KVRange, RowGroup, make_plan

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture
def model():
    return tiny_model(attn_implementation="lazyattention")


@pytest.fixture
def metadata(model):
    """A plan of one text of five tokens, made without any engine."""
    rotaries = layer_rotaries(model)
    kv_shapes = check_model(model, rotaries).kv_shapes
    positions = torch.arange(5).numpy()
    plan = make_plan(positions, positions, [KVRange("text", [0], 5, 0)], [RowGroup(0, 0, 5, 0)], block_size=8)
    kv_caches = [tuple(torch.zeros(1, 8, heads, dim) for _ in range(2)) for heads, dim in kv_shapes]
    return AttentionMetadata(plan, kv_caches, rotaries)


def call(model, **arguments):
    with torch.inference_mode():
        return model(input_ids=IDS, position_ids=torch.arange(5)[None], use_cache=False, **arguments)


def test_works_without_the_engine_and_fills_the_pool(model, metadata):
    logits = call(model, attention_metadata=metadata).logits
    model.set_attn_implementation("eager")
    assert torch.allclose(logits, call(model).logits, atol=1e-5)
    assert all((k_cache[0, :5] != 0).all() and (k_cache[0, 5:] == 0).all() for k_cache, _ in metadata.kv_caches)


def test_missing_metadata_fails(model):
    with pytest.raises(TypeError, match="attention_metadata"):
        call(model)


@pytest.mark.parametrize("attention_mask", [torch.ones(1, 5), torch.zeros(1, 1, 5, 5)])
def test_masks_are_refused_not_dropped(model, metadata, attention_mask):
    with pytest.raises(UnsupportedError, match="attention_mask was given"):
        call(model, attention_metadata=metadata, attention_mask=attention_mask)


def test_unknown_keyword_is_refused_not_swallowed(model, metadata):
    with pytest.raises(UnsupportedError, match="passes position_bias to its attention function"):
        call(model, attention_metadata=metadata, position_bias=torch.zeros(1))


def test_attention_weights_are_refused_not_left_out(model, metadata):
    with pytest.raises(UnsupportedError, match="output_attentions"):
        call(model, attention_metadata=metadata, output_attentions=True)


def test_dropout_is_refused(metadata):
    module = torch.nn.Module()
    x = torch.zeros(1, 4, 5, 16)
    with pytest.raises(UnsupportedError, match=r"dropout=0\.1"):
        attention_forward(module, x, x, x, None, attention_metadata=metadata, dropout=0.1)


def test_batches_are_refused(model, metadata):
    with pytest.raises(UnsupportedError, match="batch of 2"), torch.inference_mode():
        model(input_ids=IDS.repeat(2, 1), use_cache=False, attention_metadata=metadata)


def test_every_option_reaches_the_ops(monkeypatch):
    """Window, soft cap, sinks and scale are handed on as the model gives them, per layer."""
    seen = {}

    def note(q, k, v, metadata, layer_idx, **options):
        seen[layer_idx] = options
        return torch.zeros_like(q)

    monkeypatch.setattr(ops, "run", note)
    with torch.inference_mode():
        tiny_model("gemma2", "default", attn_implementation="lazyattention")(
            input_ids=IDS, use_cache=False, attention_metadata=object()
        )
        assert [seen[i]["sliding_window"] for i in range(4)] == [16, None, 16, None]
        assert seen[0]["logit_softcap"] == 5.0
        assert seen[0]["softmax_scale"] == 16**-0.5
        tiny_model("gpt_oss", "yarn", attn_implementation="lazyattention")(
            input_ids=IDS, use_cache=False, attention_metadata=object()
        )
        assert seen[0]["sinks"].shape == (4,)
