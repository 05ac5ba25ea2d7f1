# SPDX-License-Identifier: Apache-2.0
"""Ledger, purge list, options: what is written down and read back."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyattention.documents.client import ServerUnreachableError
from lazyattention.errors import ConfigError, NotFoundError, RequestError
from lazyattention.unlearn.config import NeuronConfig, TrainConfig, UnlearnConfig
from lazyattention.unlearn.ledger import append_entry, read_ledger
from lazyattention.unlearn.presets import CONTROLS, PRESETS, preset
from lazyattention.unlearn.purge import describe_purge, pending_purges, request_purge, run_pending_purges


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
    assert deleted == ["doc-1"]
    request_purge(path, "b", ["doc-2", "doc-3"])
    # The same request again, for another document: the first two are still there.
    request_purge(path, "b", ["doc-4"], delete=deleted.append)
    assert [line["document_ids"] for line in pending_purges(path)] == [["doc-2", "doc-3"]]
    settled = run_pending_purges(path, deleted.append)
    assert deleted == ["doc-1", "doc-4", "doc-2", "doc-3"]
    assert [line["status"] for line in settled] == ["done"]
    assert pending_purges(path) == []
    with pytest.raises(RequestError, match="no document id"):
        request_purge(path, "c", [])


def test_a_document_that_is_not_stored_does_not_keep_the_next(tmp_path):
    def delete(name):
        if name == "gone":
            raise NotFoundError(name)
        return {"id": name, "num_chunks": 2, "num_freed_bytes": 1 << 20, "held_by": ["r-1"]}

    line = request_purge(tmp_path / "purge.jsonl", "a", ["gone", "here"], delete=delete)
    assert line["status"] == "done"
    assert [entry["status"] for entry in line["documents"]] == ["not stored", "deleted"]
    assert (
        describe_purge(line) == "gone not stored, here deleted (2 chunks, 1.0 MiB), still read by 1 running request(s)"
    )


def test_a_store_that_cannot_be_reached_leaves_the_purge_pending(tmp_path):
    path = tmp_path / "purge.jsonl"

    def broken(name):
        raise ServerUnreachableError("store is away")

    line = request_purge(path, "b", ["doc-2"], delete=broken)
    assert (line["status"], line["reason"]) == ("pending", "store is away")
    assert describe_purge(line) == "PENDING for doc-2: store is away"
    with pytest.raises(ServerUnreachableError, match="away"):
        run_pending_purges(path, broken)
    assert len(pending_purges(path)) == 1


def test_a_purge_list_that_is_none_is_named(tmp_path):
    with pytest.raises(RequestError, match="cannot read the purge list"):
        pending_purges(tmp_path / "missing.jsonl")
    path = tmp_path / "purge.jsonl"
    path.write_text('{"request_id": "a"}\n')
    with pytest.raises(RequestError, match="line 1: not an entry"):
        pending_purges(path)


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
        ({"optimizer.lrr": "1"}, "unknown option 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ({"optim.lr": "1"}, "did you mean 'optimizer.lr'?"),
        ({"lr": "1"}, "write section.option, sections are attribution"),
        ({"optimizer.zzz": "1"}, "options of optimizer are betas"),
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
