# SPDX-License-Identifier: Apache-2.0
"""Weights that stay packed in memory: loaded, named by content, and reused exactly.

The tests with torchao run where it is installed; it is no dependency, since transformers imports it at every start.
"""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, TorchAoConfig

from fixtures.chunk_oracle import oracle_logits, random_tokens, reuse_logits
from fixtures.tiny_models import save_tiny, tiny_model
from fixtures.tiny_tokenizer import tiny_tokenizer
from lazyattention import envs
from lazyattention.models.loaded_model import wrap_model
from lazyattention.models.loader import load_model
from lazyattention.models.weights_id import tensors_digest


class Int8Linear(torch.nn.Module):
    """A linear layer whose weight is 8-bit numbers and one scale per row."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("row_scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.packed.to(x.dtype) * self.row_scale.to(x.dtype), self.bias)


@pytest.fixture
def quantization():
    return pytest.importorskip("torchao.quantization")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "CACHE_DIR", tmp_path / "cache")


def packed_model(seed=0):
    model = tiny_model(seed=seed)
    for layer in model.model.layers:
        for parent, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "k_proj"), (layer.mlp, "up_proj")):
            setattr(parent, name, Int8Linear(getattr(parent, name)))
    return model


def assert_reuse_is_exact(loaded):
    chunks = [random_tokens(num_tokens, seed) for seed, num_tokens in enumerate((9, 13))]
    question = random_tokens(5, seed=9)
    want = oracle_logits(loaded.model, chunks, question)
    got = reuse_logits(loaded.model, loaded.rotaries, loaded.kv_shapes, chunks, question)
    assert ((got - want).abs().max() / want.abs().max()).item() < 1e-4


def test_packed_model_in_memory_is_served_and_named_by_its_packed_weights():
    loaded = wrap_model(packed_model(), tiny_tokenizer())
    assert_reuse_is_exact(loaded)
    assert wrap_model(packed_model(), tiny_tokenizer()).weights_id == loaded.weights_id
    assert wrap_model(packed_model(seed=1), tiny_tokenizer()).weights_id != loaded.weights_id
    assert wrap_model(tiny_model(), tiny_tokenizer()).weights_id != loaded.weights_id


def test_one_packed_number_changes_the_name():
    changed = packed_model()
    changed.model.layers[2].self_attn.k_proj.packed[5, 5] += 1
    assert wrap_model(changed, tiny_tokenizer()).weights_id != wrap_model(packed_model(), tiny_tokenizer()).weights_id


def test_tensor_subclass_is_hashed_by_the_tensors_inside():
    a, b = torch.arange(4.0), torch.ones(4)
    digests = {tensors_digest({"w": TwoTensor(*pair)}) for pair in ((a, b), (b, a), (a, a))} | {
        tensors_digest({"w": a})
    }
    assert len(digests) == 4
    assert tensors_digest({"w": TwoTensor(a, b)}) in digests


def test_model_packed_by_torchao_in_memory(quantization):
    def packed(seed):
        model = tiny_model(seed=seed)
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return wrap_model(model, tiny_tokenizer())

    loaded = packed(0)
    assert_reuse_is_exact(loaded)
    assert packed(0).weights_id == loaded.weights_id != packed(1).weights_id


def test_packed_folder_stays_packed(quantization, tmp_path):
    dense = save_tiny(tmp_path / "dense")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(dense, quantization_config=config).save_pretrained(tmp_path / "packed")
    tiny_tokenizer().save_pretrained(tmp_path / "packed")
    loaded = load_model(str(tmp_path / "packed"), device="cpu", progress=False)
    assert type(loaded.model.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    assert_reuse_is_exact(loaded)


def test_adapter_stays_beside_packed_weights(quantization, tmp_path):
    peft = pytest.importorskip("peft")
    dense = save_tiny(tmp_path / "dense")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    peft.get_peft_model(tiny_model(), config).save_pretrained(tmp_path / "adapter")
    packing = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(dense, quantization_config=packing).save_pretrained(tmp_path / "packed")
    tiny_tokenizer().save_pretrained(tmp_path / "packed")
    plain = load_model(str(tmp_path / "packed"), device="cpu", progress=False)
    loaded = load_model(str(tmp_path / "packed"), device="cpu", progress=False, adapter=str(tmp_path / "adapter"))
    assert any("lora" in name for name, _ in loaded.model.named_modules())
    assert loaded.weights_id != plain.weights_id
    assert_reuse_is_exact(loaded)
