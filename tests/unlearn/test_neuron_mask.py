# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import tiny_model

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.architectures import architecture_of
from lazyattention.unlearn.config import NeuronConfig
from lazyattention.unlearn.neuron_mask import (
    NeuronMask,
    dual_share,
    freeze_all_but,
    neuron_selections,
    random_mask,
    select_neurons,
    trainable_parameters,
)

SCORES = [torch.tensor([0.1, 1.0, -3.0, 0.5, 0.21]), torch.tensor([-1.0, -2.0, -0.5, -4.0, -1.0])]


def picked(mask):
    return [layer.nonzero().flatten().tolist() for layer in mask.layers]


def select(scores=SCORES, retain_scores=None, **options):
    return select_neurons(scores, NeuronConfig(**options), axis="in", retain_scores=retain_scores)


def test_threshold_is_relative_to_each_layers_maximum():
    assert picked(select(threshold=0.2, min_per_layer=0)) == [[1, 3, 4], []]
    assert picked(select(threshold=0.5, min_per_layer=0)) == [[1], []]


def test_threshold_one_selects_nothing_unless_a_minimum_is_kept():
    assert picked(select(threshold=1.0, min_per_layer=1)) == [[1], [2]]
    with pytest.raises(ConfigError, match="selects nothing"):
        NeuronConfig(threshold=1.0, min_per_layer=0)


def test_an_all_negative_layer_is_reported_empty():
    assert select(min_per_layer=0).empty_layers == [1]


def test_nothing_at_all_is_an_error():
    with pytest.raises(ConfigError, match="no neuron is selected"):
        select([SCORES[1]], min_per_layer=0)


def test_budget_and_top_p():
    assert picked(select(select="budget", budget=0.4)) == [[1, 3], [0, 2]]
    assert picked(select(select="budget", budget=0.2, scope="global", min_per_layer=0)) == [[1, 3], []]
    # Positive score of layer 0 is 1.81: 1.0 is 55 %, 1.5 is 83 %.
    assert picked(select([SCORES[0]], select="top_p", top_p=0.5)) == [[1]]
    assert picked(select([SCORES[0]], select="top_p", top_p=0.8)) == [[1, 3]]
    assert picked(select([SCORES[0]], select="top_p", top_p=1.0)) == [[0, 1, 3, 4]]


def test_dual_policies():
    retain = [torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])]
    forget = [SCORES[0]]
    keep = select(forget, retain, dual="keep")
    assert picked(keep) == [[1, 3, 4]]
    assert picked(select(forget, retain, dual="drop")) == [[3, 4]]
    assert picked(select(forget, retain, dual="only")) == [[1]]
    assert dual_share(keep, select(retain)) == pytest.approx(1 / 3)
    with pytest.raises(ConfigError, match="retain set"):
        select(forget, dual="drop")


def test_controls():
    attributed = select(threshold=0.2)
    drawn = select(control="random", seed=3)
    assert drawn.counts == attributed.counts
    assert drawn.digest() == select(control="random", seed=3).digest()
    assert select(control="none").counts == [0, 0]
    assert select(control="all").share == 1.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(0, 2**20))
def test_a_random_mask_keeps_the_count_of_every_layer(counts, seed):
    layers = tuple(torch.arange(12) < count for count in counts)
    assert random_mask(NeuronMask("in", layers), seed).counts == counts


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=20), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_a_higher_threshold_never_selects_more(values, a, b):
    low, high = sorted((a, b))
    scores = [torch.tensor(values)]
    wide, narrow = (select(scores, threshold=t).layers[0] for t in (low, high))
    assert not (narrow & ~wide).any()


def test_seeds_draw_different_neurons():
    like = NeuronMask("in", (torch.arange(50) < 10, torch.arange(50) < 10))
    assert random_mask(like, 0).digest() != random_mask(like, 1).digest()
    assert not torch.equal(*random_mask(like, 0).layers)


def test_save_load_and_tampering(tmp_path):
    mask = select(threshold=0.2)
    mask.save(tmp_path / "mask.safetensors")
    assert NeuronMask.load(tmp_path / "mask.safetensors").digest() == mask.digest()
    content = bytearray((tmp_path / "mask.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "mask.safetensors").write_bytes(content)
    with pytest.raises(RequestError, match="fingerprint"):
        NeuronMask.load(tmp_path / "mask.safetensors")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("axis", ["in", "out"])
def test_update_masks_cover_exactly_the_neurons_slices(name, axis):
    model = tiny_model(name)
    architecture = architecture_of(model)
    num = architecture.down[0].num_neurons(axis)
    layers = tuple(torch.arange(num) % 7 == idx for idx in range(3))
    selections = neuron_selections(architecture, NeuronMask(axis, layers))
    for projection, layer in zip(architecture.down, layers, strict=True):
        update_mask = selections[projection.weight].update_mask(projection.weight)
        assert update_mask.shape == projection.weight.shape
        dim = projection.neuron_dim(axis)
        assert torch.equal(update_mask.any(dim=1 - dim), layer)
        assert torch.equal(update_mask.all(dim=1 - dim), layer)


def test_a_mask_of_another_model_is_refused():
    architecture = architecture_of(tiny_model())
    with pytest.raises(ConfigError, match="2 layers, the model 3"):
        neuron_selections(architecture, NeuronMask("in", (torch.ones(48, dtype=torch.bool),) * 2))
    with pytest.raises(ConfigError, match="32 neurons in layer 0, the model 48"):
        neuron_selections(architecture, NeuronMask("in", (torch.ones(32, dtype=torch.bool),) * 3))


def test_only_what_is_asked_for_is_trainable():
    model = tiny_model("llama-tied")
    architecture = architecture_of(model)
    layers = (torch.arange(48) < 2, torch.zeros(48, dtype=torch.bool), torch.arange(48) < 1)
    mask = NeuronMask("in", layers)
    for attention, expected in (("full", 3 * 4 + 2), ("frozen", 2)):
        named, selections = trainable_parameters(model, architecture, mask, attention)
        freeze_all_but(model, named.values())
        assert sum(param.requires_grad for param in model.parameters()) == len(named) == expected
        assert len(selections) == 2
        assert not model.get_input_embeddings().weight.requires_grad
