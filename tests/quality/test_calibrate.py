# SPDX-License-Identifier: Apache-2.0
"""Calibration: what it finds is better where it was not chosen by, is kept per model and options, and is what engines load."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from fixtures.tiny_engine import loaded_tiny, make_engine
from fixtures.tiny_models import save_tiny
from lazyattention import envs
from lazyattention.cli import app
from lazyattention.config import ChunkOptions, EngineConfig
from lazyattention.documents.document import Document
from lazyattention.engine.calibration import Calibration, find_calibration, remember_calibration, resolve
from lazyattention.engine.gate import MeasuredLoss, find_loss, remember_loss
from lazyattention.engine.scoring import score
from lazyattention.errors import ConfigError
from lazyattention.quality import calibrate as calibrate_module
from lazyattention.quality.calibrate import calibrate
from lazyattention.quality.examples import QualityExample
from lazyattention.quality.measure import MeasureConfig, layout_of, measure

FOUND = Calibration(0.8, -0.5, 0.1, 0.2, 12, "own")
CONFIG = MeasureConfig(system="Answer.", max_tokens=4)
TEXTS = ["the lighthouse stands on the northern cape", "its lamp was lit in the spring", "the keeper writes the log"]
EXAMPLES = [
    QualityExample(str(i), f"what of {TEXTS[i % 3][4:14]}?", tuple(Document(TEXTS[(i + j) % 3]) for j in range(3)))
    for i in range(6)
]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "CACHE_DIR", tmp_path / "cache")
    return tmp_path / "cache"


def engine_of(**options):
    return make_engine(loaded_tiny(num_hidden_layers=2), num_blocks=600, **options)


def test_the_search_finds_what_trying_everything_finds(monkeypatch):
    """A bowl in place of the model: its bottom is found to within the last step, within the trials allowed."""
    trials = []

    def bowl(engine, layouts, full, options):
        point = (torch.tensor(options.chunk_temperature).log().item(), options.chunk_bias)
        trials.append(point)
        return 0.3 + (point[0] + 0.43) ** 2 + 0.2 * (point[1] - 1.1) ** 2 + 0.1 * (point[0] + 0.43) * (point[1] - 1.1)

    monkeypatch.setattr(calibrate_module, "_mean_kl", bowl)
    notes = []
    found = calibrate(
        engine_of(), EXAMPLES[:4], ChunkOptions(), CONFIG, data="own", on_trial=lambda count, text: notes.append(text)
    )
    assert torch.tensor(found.chunk_temperature).log().item() == pytest.approx(-0.43, abs=0.05)
    assert found.chunk_bias == pytest.approx(1.1, abs=0.13)
    assert found.kl < found.kl_before
    assert len(notes) <= calibrate_module.MAX_TRIALS
    assert len(set(trials)) >= len(notes)


def test_what_does_not_help_the_other_half_is_not_kept(monkeypatch):
    monkeypatch.setattr(
        calibrate_module,
        "_mean_kl",
        lambda engine, layouts, full, options: abs(options.chunk_bias - (2.0 if layouts[0] == first else 0.0)),
    )
    engine = engine_of()
    first = layout_of(engine, EXAMPLES[0], CONFIG.system)
    found = calibrate(engine, EXAMPLES[:4], ChunkOptions(), CONFIG, data="own")
    assert (found.chunk_temperature, found.chunk_bias) == (1.0, 0.0)
    assert found.kl == found.kl_before


def test_the_kl_it_reports_is_that_of_requests(tmp_path):
    engine = engine_of()
    options = ChunkOptions(positions="parallel")
    found = calibrate(engine, EXAMPLES, options, CONFIG, data="own")
    assert found.kl <= found.kl_before
    apart = EXAMPLES[1::2]
    for expected, scaled in (
        (found.kl_before, options),
        (found.kl, replace(options, chunk_temperature=found.chunk_temperature, chunk_bias=found.chunk_bias)),
    ):
        name = f"positions=parallel+chunk_temperature={scaled.chunk_temperature}+chunk_bias={scaled.chunk_bias}"
        records = measure(engine, apart, replace(CONFIG, options=(name,)), tmp_path / name)
        kls = [record.metrics[name]["kl"] for record in records]
        assert sum(kls) / len(kls) == pytest.approx(expected, abs=1e-6)
    engine.check_idle()


def test_too_few_questions_are_refused():
    with pytest.raises(ConfigError, match="at least 4"):
        calibrate(engine_of(), EXAMPLES[:3], ChunkOptions(), CONFIG, data="own")


def test_engines_and_requests_load_what_was_found(caplog):
    plain = engine_of()
    layout = layout_of(plain, EXAMPLES[0], "Answer.")
    answers = [(7, 9, 3)]
    explicit = ChunkOptions(chunk_temperature=0.8, chunk_bias=-0.5)
    want = score(plain, [layout], answers, chunk_options=explicit)[0].logprobs
    with pytest.raises(ConfigError, match="--calibrate"):
        engine_of(calibrated=True)
    with pytest.raises(ConfigError, match="--calibrate"):
        score(plain, [layout], answers, chunk_options=ChunkOptions(calibrated=True))
    remember_calibration(plain.loaded.weights_id, plain.config, FOUND)
    with caplog.at_level(logging.INFO, "lazyattention"):
        engine = engine_of(calibrated=True)
    assert "chunk_temperature 0.800" in caplog.text
    assert engine.config.chunk == explicit
    torch.testing.assert_close(score(engine, [layout], answers)[0].logprobs, want)
    for_one = score(plain, [layout], answers, chunk_options=ChunkOptions(calibrated=True))[0].logprobs
    torch.testing.assert_close(for_one, want)
    assert (score(plain, [layout], answers)[0].logprobs - want).abs().max() > 1e-3


@pytest.mark.parametrize("other", [{"positions": "parallel"}, {"sink": "bos"}, {"max_chunk_len": 64}])
def test_a_calibration_belongs_to_weights_and_options(other):
    remember_calibration("weights", EngineConfig(), FOUND)
    assert find_calibration("weights", EngineConfig(), ChunkOptions(calibrated=True)) == FOUND
    config = EngineConfig.of(**other)
    assert find_calibration("weights", config, config.chunk) is None
    assert find_calibration("others", EngineConfig(), ChunkOptions()) is None


def test_the_loss_of_one_calibration_is_not_that_of_the_next():
    loss = MeasuredLoss(0.02, 0.05, 200, "nll", "own")
    for index, calibration in enumerate((FOUND, replace(FOUND, chunk_bias=0.25))):
        remember_calibration("weights", EngineConfig(), calibration)
        config = EngineConfig.of(chunk=resolve("weights", EngineConfig(), ChunkOptions(calibrated=True)))
        assert find_loss("weights", config) is None, index
        remember_loss("weights", config, loss)
        assert find_loss("weights", config) == loss


def test_a_broken_file_is_named(cache_dir):
    path = remember_calibration("weights", EngineConfig(), FOUND)
    for text in ("{", "[]", '{"chunk_bias": 1}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="calibration in .* cannot be read"):
            find_calibration("weights", EngineConfig(), ChunkOptions())


def test_the_command_calibrates_and_the_engine_loads_it(tmp_path):
    model = save_tiny(tmp_path / "model")
    data = tmp_path / "q.jsonl"
    data.write_text("".join(json.dumps(example.to_dict()) + "\n" for example in EXAMPLES))
    arguments = ["quality", "--model", str(model), "--data", str(data), "--max-tokens", "3", "--num-blocks", "400"]
    arguments += ["--option", "isolated", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--calibrate", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["isolated"]
    assert found["kl"] <= found["kl_before"]
    assert found["num_questions"] == 6
    result = CliRunner().invoke(app, [*arguments, "--option", "isolated+calibrated", "--json", "--no-plot"])
    assert result.exit_code == 0, result.output
    run = json.loads((tmp_path / "out" / "q" / "run.json").read_text())
    used = run["options"]["isolated+calibrated"]["chunk_options"]
    assert (used["chunk_temperature"], used["chunk_bias"]) == (found["chunk_temperature"], found["chunk_bias"])
    text = CliRunner().invoke(app, [*arguments, "--calibrate"])
    assert "isolated: chunk_temperature" in text.stdout
