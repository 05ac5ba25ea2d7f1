# SPDX-License-Identifier: Apache-2.0
"""What leaves a run: exact adapters, delta files that go both ways, and snapshots."""

import copy

import pytest
import torch
from peft import PeftModel
from small_models import random_batch, tiny_model

from lazyattention.errors import ConfigError, RequestError, UnsupportedError
from lazyattention.models.weights_id import tensors_digest
from lazyattention.unlearn.adapters import add_attention_lora, export_adapter, load_adapter
from lazyattention.unlearn.architectures import architecture_of
from lazyattention.unlearn.batch import logits_of
from lazyattention.unlearn.config import TrainConfig
from lazyattention.unlearn.delta import change_by_delta, write_delta
from lazyattention.unlearn.neuron_mask import NeuronMask
from lazyattention.unlearn.snapshot import base_weights


def make_mask(model, axis):
    architecture = architecture_of(model)
    num = architecture.down[0].num_neurons(axis)
    # Unequal counts per layer, one layer empty.
    layers = tuple(torch.arange(num) % (5 + 3 * idx) == idx for idx in range(2))
    return architecture, NeuronMask(axis, (*layers, torch.zeros(num, dtype=torch.bool)))


def shake(base, seed=1):
    """Change exactly the entries a run may change."""
    generator = torch.Generator().manual_seed(seed)
    base.restore(
        {
            name: value + 0.05 * torch.randn(value.shape, generator=generator).to(value.dtype)
            for name, value in base.capture().items()
        }
    )


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "phi3", "olmo2", "opt"])
@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize("attention", ["frozen", "lora"])
def test_the_exported_adapter_is_exact(name, axis, attention, tmp_path):
    model, batch = tiny_model(name), random_batch()
    pristine = copy.deepcopy(model)
    architecture, mask = make_mask(model, axis)
    base = base_weights(model, architecture, mask, attention="frozen", everything=False)
    original = base.capture()
    unlearned = model
    if attention == "lora":
        unlearned = add_attention_lora(model, architecture, TrainConfig(attention="lora", lora_rank=3, lora_alpha=5))
        for param_name, param in unlearned.named_parameters():
            if "lora_B" in param_name:
                torch.nn.init.normal_(param, std=0.2)
    shake(base)
    unlearned.eval()
    export_adapter(tmp_path, unlearned, architecture, mask, original, attention=attention, base_model_name="somewhere")
    with torch.no_grad():
        expected = logits_of(unlearned, batch)
        assert (expected - logits_of(pristine, batch)).abs().max() > 1e-2
        loaded = PeftModel.from_pretrained(pristine, str(tmp_path)).eval()
        torch.testing.assert_close(logits_of(loaded, batch), expected, atol=2e-5, rtol=1e-5)
        merged = loaded.merge_and_unload()
        error = (logits_of(merged, batch) - expected).abs().max() / expected.abs().max()
        assert error < 1e-6 if attention == "frozen" else error < 2e-6


def test_attention_trained_in_full_has_no_adapter(tmp_path):
    model = tiny_model()
    architecture, mask = make_mask(model, "in")
    with pytest.raises(UnsupportedError, match="delta file"):
        export_adapter(tmp_path, model, architecture, mask, {}, attention="full", base_model_name="x")


def test_an_adapter_can_be_merged_or_continued(tmp_path):
    model = tiny_model()
    wrapped = add_attention_lora(copy.deepcopy(model), architecture_of(model), TrainConfig(attention="lora"))
    for name, param in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.2)
    wrapped.save_pretrained(tmp_path)
    batch = random_batch()
    with torch.no_grad():
        expected = logits_of(wrapped.eval(), batch)
        merged = load_adapter(copy.deepcopy(model), tmp_path, "merge")
        torch.testing.assert_close(logits_of(merged, batch), expected, atol=1e-4, rtol=1e-4)
    continued = load_adapter(copy.deepcopy(model), tmp_path, "continue")
    assert any(p.requires_grad for n, p in continued.named_parameters() if "lora_" in n)
    assert architecture_of(continued).num_layers == 3
    with pytest.raises(ConfigError, match="adapter_config.json"):
        load_adapter(model, tmp_path / "nothing", "merge")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("axis", "everything"), [("in", False), ("out", False), ("in", True)])
def test_a_delta_goes_both_ways_to_the_last_bit(dtype, axis, everything, tmp_path):
    model = tiny_model("llama-tied", dtype=dtype)
    architecture, mask = make_mask(model, axis)
    base = base_weights(model, architecture, mask, attention="full", everything=everything)
    original, before = base.capture(), copy.deepcopy(model.state_dict())
    shake(base)
    after = copy.deepcopy(model.state_dict())
    write_delta(tmp_path / "delta.safetensors", base, original)
    assert change_by_delta(model, tmp_path / "delta.safetensors", "rollback") > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert tensors_digest(dict(model.state_dict())) == tensors_digest(before)
    change_by_delta(model, tmp_path / "delta.safetensors", "apply")
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())


def test_a_delta_for_other_weights_changes_nothing(tmp_path):
    model = tiny_model()
    architecture, mask = make_mask(model, "in")
    base = base_weights(model, architecture, mask, attention="full", everything=False)
    original = base.capture()
    shake(base)
    path = tmp_path / "delta.safetensors"
    write_delta(path, base, original)
    # The last tensor differs in one bit: no tensor before it may be touched.
    last = list(base.params.values())[-1]
    with torch.no_grad():
        last.view(-1)[0] += 1.0
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RequestError, match="is not the one after the run"):
        change_by_delta(model, path, "rollback")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RequestError, match="not the one before"):
        change_by_delta(model, path, "apply")


def test_other_files_are_no_deltas(tmp_path):
    _, mask = make_mask(tiny_model(), "in")
    mask.save(tmp_path / "mask.safetensors")
    with pytest.raises(RequestError, match="not a delta file"):
        change_by_delta(tiny_model(), tmp_path / "mask.safetensors", "apply")


def test_snapshots_hold_changeable_entries_only():
    model = tiny_model()
    architecture, mask = make_mask(model, "in")
    base = base_weights(model, architecture, mask, attention="frozen", everything=False)
    assert base.num_entries == sum(mask.counts) * 32 == sum(v.numel() for v in base.capture().values())
    values = base.capture()
    shake(base)
    base.restore(values)
    assert all(torch.equal(a, b) for a, b in zip(base.capture().values(), values.values(), strict=True))
