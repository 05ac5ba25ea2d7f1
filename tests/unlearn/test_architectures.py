# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from small_models import CONFIGS, random_batch, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from lazyattention.errors import UnsupportedError
from lazyattention.unlearn.architectures import (
    architecture_of,
    attention_parameters,
    supported_model_types,
)
from lazyattention.unlearn.batch import logits_of


def test_every_listed_architecture_has_a_tiny_model_here():
    tested = {options.get("model_type", name) for name, options in CONFIGS.items()}
    assert tested == set(supported_model_types())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("axis", ["in", "out"])
def test_a_neuron_is_the_slice_its_activation_reaches(name, axis):
    """Zeroing the slice of one neuron equals zeroing that neuron's activation, in every architecture."""
    model = tiny_model(name)
    architecture = architecture_of(model)
    batch = random_batch()
    projection = architecture.down[1]
    k, dim = 5, projection.neuron_dim(axis)
    assert projection.num_neurons(axis) == projection.weight.shape[dim]

    def silence(activation):
        changed = activation.clone()
        changed[..., k] = 0.0 if axis == "in" or projection.module.bias is None else projection.module.bias[k]
        return changed

    if axis == "in":
        handle = projection.module.register_forward_pre_hook(lambda _, args: (silence(args[0]),))
    else:
        handle = projection.module.register_forward_hook(lambda _, args, output: silence(output))
    with torch.no_grad():
        expected = logits_of(model, batch)
        handle.remove()
        before = logits_of(model, batch)
        projection.weight.select(dim, k).zero_()
        actual = logits_of(model, batch)
    assert not torch.allclose(before, actual, atol=1e-4)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_parameters_are_all_of_attention_and_nothing_else(name):
    """Found by what they reach: changing them changes logits; what is left in the layer is MLP and norms."""
    model = tiny_model(name)
    architecture = architecture_of(model)
    found = {id(param) for _, param in attention_parameters(architecture)}
    for layer in architecture.layers:
        for param_name, param in layer.named_parameters():
            is_attention = ("attn" in param_name or "attention" in param_name) and "norm" not in param_name
            assert (id(param) in found) == is_attention, param_name


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "gpt_oss", "bloom"])
def test_other_architectures_are_refused_by_name(model_type):
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 50, "num_attention_heads": 4, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    reason = "expert" if model_type != "bloom" else "down-projections"
    with pytest.raises(UnsupportedError, match=f"(?s){model_type}.*{reason}"):
        architecture_of(model)


def test_a_shared_projection_is_refused():
    model = tiny_model()
    layers = model.model.layers
    layers[1].mlp.down_proj.weight = layers[0].mlp.down_proj.weight
    with pytest.raises(UnsupportedError, match="shared"):
        architecture_of(model)


def test_a_replaced_projection_class_is_refused():
    model = tiny_model()
    model.model.layers[0].mlp.down_proj = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(UnsupportedError, match="Bilinear"):
        architecture_of(model)
