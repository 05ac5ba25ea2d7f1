# SPDX-License-Identifier: Apache-2.0
"""Round to nearest, group by group: by hand, by its properties, and on the right weights of each architecture."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from qa_fixtures import qa_model, qa_tokenizer

from lazyattention.unlearn.data import generate_people
from lazyattention.unlearn.probes import ProbeOptions, run_probes
from lazyattention.unlearn.probes.quantize import quantize_model, round_to_nearest


def test_one_group_by_hand():
    # Range 0 to 3 in two bits: steps of 1. A second, shorter group keeps its own range.
    weight = torch.tensor([[0.0, 0.4, 1.6, 3.0, -1.0, -0.2]])
    found = round_to_nearest(weight, num_bits=2, group_size=4)
    expected = torch.tensor([[0.0, 0.0, 2.0, 3.0, -1.0, -0.2]])
    assert torch.allclose(found, expected, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 300),
    num_bits=st.integers(2, 8),
    group_size=st.sampled_from([2, 7, 64, 128]),
    seed=st.integers(0, 1000),
)
def test_properties_of_rounding(rows, columns, num_bits, group_size, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    found = round_to_nearest(weight, num_bits=num_bits, group_size=group_size)
    assert found.shape == weight.shape
    for start in range(0, columns, group_size):
        part, was = found[:, start : start + group_size], weight[:, start : start + group_size]
        step = (was.amax(1) - was.amin(1)) / (2**num_bits - 1)
        assert ((part - was).abs().amax(1) <= step / 2 * (1 + 1e-4) + 1e-6).all()
        assert all(len(row.unique()) <= 2**num_bits for row in part)
        assert torch.allclose(part.amin(1), was.amin(1), atol=1e-6)
        assert torch.allclose(part.amax(1), was.amax(1), atol=1e-5)
    assert torch.allclose(round_to_nearest(found, num_bits=num_bits, group_size=group_size), found, atol=1e-5)


def test_a_constant_group_stays():
    weight = torch.full((2, 10), 0.3)
    assert torch.equal(round_to_nearest(weight, num_bits=4, group_size=4), weight)


def test_dtype_and_leading_dimensions_are_kept():
    weight = torch.randn(3, 4, 10, dtype=torch.bfloat16)
    found = round_to_nearest(weight, num_bits=4, group_size=4)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[1], round_to_nearest(weight[1], num_bits=4, group_size=4))


def changed_names(model):
    before = copy.deepcopy(model.state_dict())
    quantize_model(model, num_bits=4, group_size=16)
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_head_norms_and_biases_are_left_alone(tied):
    names = changed_names(qa_model(tie_word_embeddings=tied, attention_bias=True))
    assert names == {
        f"model.layers.{layer}.{part}.weight"
        for layer in range(2)
        for part in (
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    }


def test_gpt2s_transposed_layers_are_grouped_along_their_input():
    model = qa_model("gpt2")
    weight = model.transformer.h[0].mlp.c_fc.weight.detach().clone()  # [in_features, out_features]
    names = changed_names(model)
    assert not any("wte" in name or "wpe" in name or "ln_" in name or "bias" in name for name in names)
    expected = round_to_nearest(weight.t(), num_bits=4, group_size=16).t()
    assert torch.equal(model.transformer.h[0].mlp.c_fc.weight, expected)


def test_an_adapter_is_merged_before_rounding():
    def load():
        model = get_peft_model(qa_model(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(0)))
        return model

    splits = generate_people(6, 0, num_facts=2)
    options = {"probes": ["quantize"], "options": ProbeOptions(max_examples=4), "progress": False}
    with_adapter = run_probes(load, qa_tokenizer(), splits, **options)["probes"]["quantize"]
    merged = run_probes(lambda: load().merge_and_unload(), qa_tokenizer(), splits, **options)["probes"]["quantize"]
    assert with_adapter == merged
