# SPDX-License-Identifier: Apache-2.0
"""What adapting refuses before it works, and the command from flags to adapter."""

import json
import sys

import pytest
from typer.testing import CliRunner

from fixtures.tiny_engine import loaded_tiny
from fixtures.tiny_models import save_tiny, tiny_model
from lazyattention.adapt import workflow
from lazyattention.adapt.cli import read_range
from lazyattention.adapt.config import AdaptConfig
from lazyattention.adapt.workflow import AdaptRequest, run_adapt
from lazyattention.cli import app
from lazyattention.config import ChunkOptions
from lazyattention.engine.engine import Engine
from lazyattention.errors import ConfigError
from lazyattention.models.loader import load_model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"full_share": 1.5}, "full_share"),
        ({"plain_share": 1.5}, "plain_share"),
        ({"teacher_documents": "some"}, "teacher_documents must be 'gold' or 'all', got 'some'"),
        ({"keep_full": True, "full_share": 0.0}, "keep_full has no effect while full_share is 0"),
        ({"keep_full": True, "teacher_documents": "all"}, "keep_full has no effect where the teacher always reads all"),
        ({"max_minutes": 0}, "max_minutes"),
        ({"rank": -1}, "rank"),
        ({"chunk": ChunkOptions(chunk_bias=1.0)}, "chunk_temperature, chunk_bias"),
        ({"chunk": ChunkOptions(calibrated=True)}, "calibrated"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        AdaptConfig(**options)


def test_ranges_are_read():
    assert read_range("7") == (7, 7)
    assert read_range("2-10") == (2, 10)
    for wrong in ("x", "2-", "5-2", "0"):
        with pytest.raises(ConfigError, match="num-documents"):
            read_range(wrong)


def test_the_command_adapts(tmp_path):
    folder = save_tiny(tmp_path / "model", tiny_model(num_hidden_layers=2, max_position_embeddings=4096))
    arguments = ["adapt", "--model", str(folder), "--data", "needle", "--output", str(tmp_path / "adapter")]
    arguments += [
        "--num-questions",
        "6",
        "--num-documents",
        "2",
        "--max-tokens",
        "3",
        "--max-steps",
        "2",
        "--rank",
        "4",
    ]
    arguments += ["--gradient-checkpointing", "--teacher-documents", "gold", "--plain-share", "0.75", "--keep-full"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "held-out loss under the chunk mask" in result.output
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    report = json.loads((tmp_path / "adapter" / "adapt.json").read_text())
    config = report["config"]
    assert (config["teacher_documents"], config["plain_share"], config["keep_full"]) == ("gold", 0.75, True)
    plain = [evaluation["plain"] for evaluation in (report["evaluations"][0], report["evaluations"][-1])]
    assert "on plain text of the documents {:.4f} -> {:.4f}".format(*plain) in result.output
    Engine(load_model(str(folder), adapter=str(tmp_path / "adapter"), progress=False))
    wrong = CliRunner().invoke(app, [*arguments, "--num-questions", "5"])
    assert "one for each of the 1 data sources, got 2" in " ".join(wrong.output.split())
    wrong = CliRunner().invoke(app, [*arguments, "--objective", "distil"])
    assert wrong.exit_code == 2
    wrong = CliRunner().invoke(app, [*arguments, "--teacher-documents", "some"])
    assert "teacher_documents must be 'gold' or 'all', got 'some'" in " ".join(wrong.output.split())


def test_a_missing_package_is_named_before_any_sample_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(workflow, "prepare_samples", lambda *_: pytest.fail("minutes of work before the error"))
    with pytest.raises(ConfigError, match="peft"):
        run_adapt(loaded_tiny(num_hidden_layers=1), AdaptRequest(data=("needle",), output=tmp_path))
