# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch

from fixtures.tiny_models import save_tiny, tiny_model
from lazyattention import envs
from lazyattention.config import EngineConfig
from lazyattention.engine.engine import Engine
from lazyattention.engine.measured import prompt_options
from lazyattention.errors import ConfigError
from lazyattention.models.loader import load_model

peft = pytest.importorskip("peft")
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "CACHE_DIR", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "model")


def make_adapter(folder, seed, **model_options):
    """Save a LoRA adapter with weights that matter; return its logits on IDS."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_model(**model_options), config).eval()
    adapted.save_pretrained(folder)
    with torch.inference_mode():
        return adapted(input_ids=IDS, use_cache=False).logits


def load(folder, **options):
    return load_model(str(folder), device="cpu", progress=False, **options)


def test_adapter_is_applied_and_named_in_the_id(folder, tmp_path):
    want = make_adapter(tmp_path / "first", seed=1)
    make_adapter(tmp_path / "second", seed=2)
    loaded = load(folder, adapter=str(tmp_path / "first"))
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        got = loaded.model(input_ids=IDS, use_cache=False).logits
    assert torch.allclose(got, want, atol=1e-4)
    ids = {load(folder).weights_id, loaded.weights_id, load(folder, adapter=str(tmp_path / "second")).weights_id}
    assert len(ids) == 3
    assert load(folder, adapter=str(tmp_path / "first")).weights_id == loaded.weights_id


def test_adapter_settings_are_part_of_the_id(folder, tmp_path):
    make_adapter(tmp_path / "adapter", seed=1)
    before = load(folder, adapter=str(tmp_path / "adapter")).weights_id
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 32}))
    assert load(folder, adapter=str(tmp_path / "adapter")).weights_id != before


def test_adapter_of_another_shape_is_named(folder, tmp_path):
    make_adapter(tmp_path / "adapter", seed=1, hidden_size=32)
    with pytest.raises(ConfigError, match="does not fit the model"):
        load(folder, adapter=str(tmp_path / "adapter"))


def test_cut_adapter_is_named(folder, tmp_path):
    make_adapter(tmp_path / "adapter", seed=1)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="does not fit the model"):
        load(folder, adapter=str(tmp_path / "adapter"))


def test_adapter_for_modules_the_model_lacks_is_named(folder, tmp_path):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    peft.get_peft_model(tiny_model(num_hidden_layers=6), config).save_pretrained(tmp_path / "deeper")
    with pytest.raises(ConfigError, match="does not fit the model"):
        load(folder, adapter=str(tmp_path / "deeper"))


def test_an_adapter_made_for_other_weights_is_said(folder, tmp_path, caplog):
    make_adapter(tmp_path / "adapter", seed=1)
    load(folder, adapter=str(tmp_path / "adapter"))
    report = tmp_path / "adapter" / "adapt.json"
    base = load(folder)
    assert base.adapter_notes is None
    report.write_text(json.dumps({"model": "model", "base_weights_id": base.weights_id, "served_with": {"a": 1}}))
    load(folder, adapter=str(tmp_path / "adapter"))
    assert "other weights" not in caplog.text
    other = save_tiny(tmp_path / "other", tiny_model(seed=3))
    load(other, adapter=str(tmp_path / "adapter"))
    assert "was made for other weights (of model) than those of other" in caplog.text


def test_a_folder_without_an_adapter_is_named(folder, tmp_path):
    with pytest.raises(ConfigError, match="absent' has no adapter_config.json"):
        load(folder, adapter=str(tmp_path / "absent"))
    make_adapter(tmp_path / "adapter", seed=1)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="adapter' has no weights: .*adapter_model.safetensors"):
        load(folder, adapter=str(tmp_path / "adapter"))


def test_an_adapter_served_with_other_options_is_said(folder, tmp_path, caplog):
    make_adapter(tmp_path / "adapter", seed=1)
    plain = EngineConfig.of(num_blocks=20, block_size=8)
    notes = {"model": "model", "base_weights_id": load(folder).weights_id, "served_with": prompt_options(plain)}
    (tmp_path / "adapter" / "adapt.json").write_text(json.dumps(notes))
    loaded = load(folder, adapter=str(tmp_path / "adapter"))
    Engine(loaded, EngineConfig.of(plain, chunk_temperature=0.9, num_blocks=30))
    assert caplog.text == ""
    Engine(loaded, EngineConfig.of(plain, encoding="isolated", max_chunk_len=64))
    assert "made for encoding=after_preamble, max_chunk_len=" in caplog.text
    assert "the engine has encoding=isolated, max_chunk_len=64: serve it with the same" in caplog.text
