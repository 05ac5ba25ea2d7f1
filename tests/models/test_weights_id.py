# SPDX-License-Identifier: Apache-2.0
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.tiny_models import save_tiny, tiny_model
from fixtures.tiny_tokenizer import tiny_tokenizer
from lazyattention import envs
from lazyattention.models import weights_id
from lazyattention.models.loaded_model import wrap_model
from lazyattention.models.loader import load_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "CACHE_DIR", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "model")


def id_of(folder, **options):
    return load_model(str(folder), device="cpu", progress=False, **options).weights_id


def change_one_weight(folder, amount=1e-3):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"][-1, -1] += amount
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_same_content_elsewhere_has_the_same_id(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert id_of(folder) == id_of(tmp_path / "copy")


def test_id_does_not_depend_on_the_dtype_it_is_loaded_in(folder):
    assert id_of(folder, dtype="bfloat16") == id_of(folder, dtype="float32")


def test_one_changed_weight_changes_the_id(folder):
    before = id_of(folder)
    change_one_weight(folder)
    assert id_of(folder) != before


def test_changed_file_with_old_time_and_size_changes_the_id(folder):
    """A file rewritten in place by a tool that puts its time back must not bring the old digest back."""
    before = id_of(folder)
    weights = folder / "model.safetensors"
    stat = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x01")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = weights.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    assert id_of(folder) != before


def test_rope_settings_change_the_id(folder):
    before = id_of(folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("10000.0", "20000.0"))
    assert id_of(folder) != before


def test_unchanged_file_is_hashed_once(folder, monkeypatch):
    before = id_of(folder)
    monkeypatch.setattr(weights_id, "_hash_content", lambda path: pytest.fail("hashed again"))
    assert id_of(folder) == before


def test_broken_memo_is_hashed_again(folder):
    before = id_of(folder)
    for memo in (envs.CACHE_DIR / "digests").iterdir():
        memo.write_text("{")
    assert id_of(folder) == before


def test_model_in_memory_is_named_by_its_values():
    def wrapped(model):
        return wrap_model(model, tiny_tokenizer()).weights_id

    first = wrapped(tiny_model())
    assert wrapped(tiny_model()) == first
    assert wrapped(tiny_model(seed=1)) != first
    changed = tiny_model()
    changed.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-6
    assert wrapped(changed) != first
    # The same numbers in a narrower type are the same weights; rounded ones are not.
    exact = tiny_model().bfloat16().float()
    assert wrapped(tiny_model().bfloat16()) == wrapped(exact) != first


def test_digest_of_tensors_keeps_names_shapes_and_types_apart():
    a, b = torch.zeros(4), torch.ones(4)
    digests = [
        weights_id.tensors_digest(tensors)
        for tensors in (
            {"a": a, "b": b},
            {"a": b, "b": a},
            {"a": a.reshape(2, 2), "b": b},
            {"a": a.to(torch.int32), "b": b},
            {"ab": a, "": b},
            {"a": a},
        )
    ]
    assert len(set(digests)) == len(digests)
