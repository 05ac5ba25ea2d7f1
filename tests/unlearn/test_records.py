# SPDX-License-Identifier: Apache-2.0
"""Ledger, purge list, options: what is written down and read back."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyattention.errors import ConfigError, RequestError
from lazyattention.unlearn.config import NeuronConfig, TrainConfig, UnlearnConfig
from lazyattention.unlearn.ledger import append_entry, read_ledger
from lazyattention.unlearn.presets import CONTROLS, PRESETS, preset
from lazyattention.unlearn.purge import pending_purges, request_purge, run_pending_purges


def three_entries(path):
    return [append_entry(path, {"event": "unlearn", "request_id": f"r{i}", "note": "ü"}) for i in range(3)]


def test_a_ledger_verifies_and_is_in_order(tmp_path):
    path = tmp_path / "ledger.jsonl"
    assert read_ledger(path) == []
    written = three_entries(path)
    assert read_ledger(path) == written
    assert [entry["request_id"] for entry in written] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("change", ["edit", "remove first", "swap", "cut line", "insert"])
def test_tampering_is_found_and_nothing_is_appended(tmp_path, change):
    path = tmp_path / "ledger.jsonl"
    three_entries(path)
    lines = path.read_text().splitlines()
    lines = {
        "edit": [lines[0], lines[1].replace("r1", "r9"), lines[2]],
        "remove first": lines[1:],
        "swap": [lines[1], lines[0], lines[2]],
        "cut line": [*lines[:2], lines[2][:-5]],
        "insert": [lines[0], lines[0], *lines[1:]],
    }[change]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RequestError, match="line"):
        read_ledger(path)
    size = path.stat().st_size
    with pytest.raises(RequestError, match="line"):
        append_entry(path, {"event": "unlearn"})
    assert path.stat().st_size == size


def test_a_purge_is_done_now_or_pending(tmp_path):
    path = tmp_path / "purge.jsonl"
    deleted = []
    assert request_purge(path, "a", ["doc-1"], delete=deleted.append)["status"] == "done"
    assert deleted == [["doc-1"]]
    request_purge(path, "b", ["doc-2", "doc-3"], scope="tenant")
    assert [line["request_id"] for line in pending_purges(path)] == ["b"]
    calls = []
    assert run_pending_purges(path, lambda ids, scope: calls.append((ids, scope))) == 1
    assert calls == [(["doc-2", "doc-3"], "tenant")]
    assert pending_purges(path) == []
    with pytest.raises(RequestError, match="no document id"):
        request_purge(path, "c", [])


def test_a_failed_deletion_stays_pending(tmp_path):
    path = tmp_path / "purge.jsonl"
    request_purge(path, "b", ["doc-2"])

    def broken(ids, scope):
        raise OSError("store is away")

    with pytest.raises(OSError, match="away"):
        run_pending_purges(path, broken)
    assert len(pending_purges(path)) == 1


@pytest.mark.parametrize("name", [*PRESETS, "simu+random", "simu-mlp+all", "simu+none+adamw"])
def test_every_method_round_trips_through_json(name):
    config = preset(name)
    assert UnlearnConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CONTROLS)), st.floats(1e-8, 1.0), st.integers(1, 50))
def test_text_options_equal_typed_ones(control, lr, steps):
    typed = preset(f"simu+{control}", overrides={"optimizer.lr": lr, "attribution.num_steps": steps})
    text = preset(f"simu+{control}", overrides={"optimizer.lr": repr(lr), "attribution.num_steps": str(steps)})
    assert typed == text


def test_options_are_converted_and_refused_by_name():
    config = UnlearnConfig().with_options(
        {"optimizer.betas": "0.8,0.9", "guards.target": "1.5", "attribution.contrast": "true", "train.save_steps": "5"}
    )
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.guards.target == 1.5
    assert config.attribution.contrast
    assert config.with_options({"guards.target": "none"}).guards.target is None
    for options, message in (
        ({"optimizer.learning_rate": "1"}, "unknown option"),
        ({"optim.lr": "1"}, "unknown option"),
        ({"optimizer.lr": "fast"}, "cannot be read"),
        ({"attribution.contrast": "maybe"}, "cannot be read"),
        ({"train.attention": "half"}, "must be one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            UnlearnConfig().with_options(options)
    with pytest.raises(ConfigError, match="unknown section"):
        UnlearnConfig.from_dict({"optim": {}})


def test_options_that_do_not_fit_together():
    with pytest.raises(ConfigError, match="trains nothing"):
        UnlearnConfig(train=TrainConfig(attention="frozen"), neurons=NeuronConfig(control="none"))
    with pytest.raises(ConfigError, match="quantised weights cannot be trained"):
        TrainConfig(quantize="4bit")
    with pytest.raises(ConfigError, match="changes nothing"):
        preset("soul+random")
    with pytest.raises(ConfigError, match="did you mean 'graddiff'"):
        preset("graddif")


def test_attribution_runs_only_when_it_is_needed():
    assert preset("simu").needs_attribution
    assert preset("simu+random").needs_attribution
    assert not preset("simu+random", overrides={"neurons.select": "budget"}).needs_attribution
    assert not preset("simu+none").needs_attribution
    assert not preset("soul").needs_attribution


def test_a_quantised_base_needs_bitsandbytes(monkeypatch, tmp_path):
    from transformers import AutoConfig

    from lazyattention.unlearn import loading

    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="bitsandbytes"):
        loading.load_trainable(str(tmp_path), TrainConfig(attention="lora", quantize="4bit"))
