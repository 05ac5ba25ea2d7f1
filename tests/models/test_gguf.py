# SPDX-License-Identifier: Apache-2.0
import json
import multiprocessing
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fixtures.tiny_gguf import write_tiny_gguf
from lazyattention import envs
from lazyattention.errors import ConfigError
from lazyattention.models import gguf
from lazyattention.models.loader import load_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "CACHE_DIR", tmp_path / "cache")


@pytest.fixture
def path(tmp_path):
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def load(path):
    return load_model(str(path), device="cpu", progress=False)


def converted_folders():
    return list((envs.CACHE_DIR / "models").iterdir())


def test_gguf_file_loads_with_tokenizer_and_template(path):
    loaded = load(path)
    assert (loaded.name, loaded.num_layers, loaded.kv_shapes[0], loaded.eos_token_ids) == ("tiny", 2, (2, 16), {3})
    assert loaded.tokenizer.decode(loaded.tokenizer("the lighthouse é").input_ids) == "the lighthouse é"
    assert loaded.has_chat_template
    assert getattr(loaded.model.config, "quantization_config", None) is None


def test_weights_are_the_dequantised_ones(path):
    """8-bit blocks keep each weight to 1/254 of its block's largest."""
    rng = np.random.default_rng(0)
    want = torch.from_numpy(rng.normal(0, 0.15, (384, 64)).astype(np.float32))
    got = load(path).model.get_input_embeddings().weight
    block_max = want.reshape(384, 2, 32).abs().amax(-1, keepdim=True)
    assert ((got - want[: len(got)]).reshape(len(got), 2, 32).abs() <= block_max[: len(got)] / 200).all()


def test_second_start_converts_nothing(path, monkeypatch):
    first = load(path)
    monkeypatch.setattr(gguf, "_convert", lambda *args: pytest.fail("converted twice"))
    assert load(path).weights_id == first.weights_id


def test_folder_of_one_gguf_file_is_a_model_folder(path, tmp_path):
    (tmp_path / "folder").mkdir()
    shutil.copy(path, tmp_path / "folder" / "tiny.gguf")
    assert load(tmp_path / "folder").weights_id == load(path).weights_id


def test_other_content_under_the_same_name_is_another_model(path):
    first = load(path).weights_id
    write_tiny_gguf(path, seed=1)
    assert load(path).weights_id != first
    assert len(converted_folders()) == 2


def cut(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])


def flip_one_bit(folder):
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)


def lose_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def lose_manifest(folder):
    (folder / "lazyattention.json").unlink()


def garble_manifest(folder):
    (folder / "lazyattention.json").write_text(json.dumps({"files": 3}))


@pytest.mark.parametrize("damage", [cut, flip_one_bit, lose_tokenizer, lose_manifest, garble_manifest])
def test_damaged_cache_is_rebuilt(path, damage):
    first = load(path).weights_id
    (folder,) = converted_folders()
    damage(folder)
    assert not gguf.is_complete(folder)
    assert load(path).weights_id == first
    assert converted_folders() == [folder]
    assert gguf.is_complete(folder)


def test_failed_conversion_leaves_nothing_behind(path):
    path.write_bytes(path.read_bytes()[:20000])
    with pytest.raises(ConfigError, match="cannot be read as a GGUF model"):
        load(path)
    assert converted_folders() == []


def test_loser_of_a_race_keeps_the_winners_folder(path, tmp_path):
    folder = gguf.prepare_gguf(path)
    before = (folder / "model.safetensors").stat().st_ino
    work = tmp_path / "work"
    shutil.copytree(folder, work)
    gguf._publish(work, folder)
    assert (folder / "model.safetensors").stat().st_ino == before


def _convert_in_a_process(path, cache, results):
    envs.CACHE_DIR = cache
    results.put(str(gguf.prepare_gguf(path)))


def test_two_processes_may_convert_at_once(path, tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_convert_in_a_process, args=(path, envs.CACHE_DIR, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    folders = {results.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    (folder,) = converted_folders()
    assert folders == {str(folder)}
    assert gguf.is_complete(folder)


@pytest.mark.parametrize("keep", [3, 100, 20000, -100])
def test_cut_file_is_named(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"tiny\.gguf (is not a GGUF file|cannot be read as a GGUF model)"):
        load(path)


def test_file_that_lacks_a_tensor_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"1 missing keys \(model.layers.1.mlp.up_proj.weight"):
        load(write_tiny_gguf(tmp_path / "holes.gguf", without="blk.1.ffn_up.weight"))


def test_architecture_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="architecture bert"):
        load(write_tiny_gguf(tmp_path / "bert.gguf", arch="bert"))


def test_saved_weights_hold_no_copy_of_tied_embeddings(path):
    """The default model is tied; a stray lm_head would cost a fifth of its size."""
    from fixtures.tiny_models import tiny_model

    work = path.parent / "work"
    work.mkdir()
    gguf._save(tiny_model(tie_word_embeddings=True), work)
    assert "lm_head.weight" not in load_file(work / "model.safetensors")


def test_digest_memo_that_cannot_be_written_is_said(path, monkeypatch, caplog):
    (path.parent / "blocked").write_text("a file where a folder should be")
    monkeypatch.setattr(envs, "CACHE_DIR", path.parent / "blocked")
    from lazyattention.models.weights_id import file_digest

    assert len(file_digest(path)) == 32
    assert "LAZYATTENTION_CACHE_DIR" in caplog.text
