# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest
import torch

from fixtures.tiny_models import tiny_model
from lazyattention.errors import ConfigError, UnsupportedError
from lazyattention.models.probe import check_model, probe, tolerances
from lazyattention.models.rope import layer_rotaries
from lazyattention.ops import LayerRotary

FAMILIES = [
    ("llama", "default"),
    ("llama", "yarn"),
    ("phi", "partial rotary"),
    ("cohere", "default"),
    ("gemma3_text", "a table per layer type"),
    ("smollm3", "some layers without RoPE"),
    ("mixtral", "default"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def other_pairs(rotary):
    return dataclasses.replace(rotary, is_interleaved=not rotary.is_interleaved)


def half_width(rotary):
    return LayerRotary(rotary.inv_freq[::2].contiguous(), rotary.rotary_dim // 2, rotary.is_interleaved)


def other_theta(rotary):
    return dataclasses.replace(rotary, inv_freq=rotary.inv_freq**1.02)


def other_sign(rotary):
    return dataclasses.replace(rotary, inv_freq=-rotary.inv_freq)


def no_rope(rotary):
    return LayerRotary(inv_freq=None, rotary_dim=0)


def prepared(model_type, variant, dtype=torch.float32):
    model = tiny_model(model_type, variant, attn_implementation="lazyattention").to(dtype)
    return model, layer_rotaries(model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("model_type", "variant"), FAMILIES)
def test_right_model_passes_with_room_to_spare(model_type, variant, dtype):
    model, rotaries = prepared(model_type, variant, dtype)
    result = check_model(model, rotaries)
    turn_tolerance, logit_tolerance = tolerances(model)
    assert max(result.turn_errors) < turn_tolerance / 4
    assert result.logit_error < logit_tolerance / 4


@pytest.mark.parametrize("mutate", [other_pairs, half_width, other_theta, other_sign, no_rope])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("model_type", "variant"), FAMILIES)
def test_one_wrong_layer_is_found_and_named(model_type, variant, dtype, mutate):
    model, rotaries = prepared(model_type, variant, dtype)
    rotaries[1] = mutate(rotaries[1])
    with pytest.raises(UnsupportedError, match=r"layers \[1\] .* are not turned by position as expected"):
        check_model(model, rotaries)
    # The gap is wide: what is wrong is off by far more than what is allowed.
    assert probe(model, rotaries).turn_errors[1] > 5 * tolerances(model)[0]


def test_layer_wrongly_taken_to_have_rope_is_found():
    model, rotaries = prepared("smollm3", "some layers without RoPE")
    assert rotaries[3].inv_freq is None
    rotaries[3] = rotaries[0]
    with pytest.raises(UnsupportedError, match=r"layers \[3\]"):
        check_model(model, rotaries)


def test_tables_of_other_layer_types_are_found():
    model, rotaries = prepared("gemma3_text", "a table per layer type")
    with pytest.raises(UnsupportedError, match=r"layers \[0, 1\]"):
        check_model(model, [rotaries[1], rotaries[0], *rotaries[2:]])


@pytest.mark.parametrize(
    ("model_type", "variant"),
    [("llama", "dynamic"), ("phi3", "longrope"), ("hunyuan_v1_dense", "any"), ("llama4_text", "query temperature")],
)
def test_what_the_matrix_refuses_the_probe_would_find(model_type, variant):
    """Frequencies that depend on the length, weights after the rotation, a query scale that depends on the position."""
    model = tiny_model(model_type, variant, attn_implementation="lazyattention")
    table = model.model.rotary_emb.inv_freq.clone()
    rotaries = [LayerRotary(table, 2 * len(table), is_interleaved=model_type == "llama4_text") for _ in range(4)]
    if model_type == "llama4_text":
        rotaries[3] = LayerRotary(inv_freq=None, rotary_dim=0)
    with pytest.raises(UnsupportedError, match="are not turned by position as expected"):
        check_model(model, rotaries)


def test_attention_that_differs_from_the_models_own_is_found(monkeypatch):
    model, rotaries = prepared("gemma2", "default")
    from lazyattention import ops

    run = ops.run
    monkeypatch.setattr(ops, "run", lambda *args, **options: run(*args, **{**options, "logit_softcap": None}))
    with pytest.raises(UnsupportedError, match="other logits through our attention function"):
        check_model(model, rotaries)


def test_rounding_that_depends_on_the_number_of_tokens_is_no_fault():
    """As on a GPU, where a product of another size is another kernel."""
    model = tiny_model("llama", num_hidden_layers=2)

    def round_otherwise(module, inputs, output):
        generator = torch.Generator().manual_seed(output.shape[1])
        noise = torch.randn(output.shape[-1], generator=generator)
        return output + 0.2 * output.std() * noise

    model.model.layers[0].mlp.register_forward_hook(round_otherwise)
    check_model(model, layer_rotaries(model))


def test_weights_that_are_not_finite_are_refused():
    model, rotaries = prepared("llama", "default")
    model.model.layers[2].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(ConfigError, match="not finite"):
        check_model(model, rotaries)


def test_probe_leaves_the_model_as_it_was():
    model, rotaries = prepared("llama", "default")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_model(model, rotaries)
    assert model.config._attn_implementation == "lazyattention"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
