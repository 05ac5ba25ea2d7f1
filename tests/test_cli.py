# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints where, what it refuses and how, and that it starts fast."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from fixtures.tiny_models import save_tiny
from lazyattention.cli import app
from lazyattention.cli.ask import spread_documents
from lazyattention.cli.options import engine_fields
from lazyattention.errors import RequestError, UnsupportedError

RUN = CliRunner()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model")))


@pytest.fixture
def folder(tmp_path):
    for name, text in [("a.txt", "alpha beta gamma"), ("b.md", "# Delta\n\nepsilon zeta"), ("c.txt", "eta theta iota")]:
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    return tmp_path


def ask(*args, **options):
    # Few blocks: by default the engine reserves a quarter of the memory.
    return RUN.invoke(app, ["ask", "--num-blocks", "128", *map(str, args)], **options)


def ask_json(*args, **options):
    result = ask("--json", *args, **options)
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_answer_goes_to_stdout_and_the_report_to_stderr(model, folder):
    result = ask("-m", model, "-d", folder, "--max-tokens", 4, "what is alpha")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()
    for name in ("a.txt", "b.md", "c.txt"):
        assert name in result.stderr
        assert name not in result.stdout
    assert "miss" in result.stderr
    assert "prompt tokens computed" in result.stderr
    assert "1 not read" in result.stderr
    assert "picture.png: a binary file" in result.stderr


def test_blocks_are_recomputed_on_request(model, folder):
    [line] = ask_json("-m", model, "-d", folder, "--max-tokens", 4, "--recompute", "first:16", "what is alpha")
    assert line["num_recomputed_tokens"] == sum(item["num_recomputed_tokens"] for item in line["documents"]) > 0
    assert "recomputed" in ask("-m", model, "-d", folder, "--recompute", "attention:0.5", "what").stderr
    result = ask("-m", "no such model", "-d", folder, "--recompute", "frist:16", "what")
    assert (result.exit_code, "did you mean 'first'" in result.stderr) == (2, True)


def test_the_report_names_the_method_that_ran_not_the_one_that_was_wanted(model, folder):
    [line] = ask_json("-m", model, "-d", folder, "--max-tokens", 4, "--max-loss", 0.1, "what is alpha")
    assert line["reuse_method"] == "full_recompute"  # nothing was measured for this model
    assert {item["status"] for item in line["documents"]} == {"computed"}


def test_second_question_finds_the_documents(model, folder):
    first, second = ask_json("-m", model, "-d", folder, "--max-tokens", 4, "what is alpha", "what is zeta")
    assert [item["status"] for item in first["documents"]] == ["miss"] * 3
    assert [item["status"] for item in second["documents"]] == ["hit"] * 3
    assert {item["reason"] for item in second["documents"]} == {"reused"}
    assert second["num_reused_tokens"] >= sum(item["num_tokens"] for item in second["documents"])
    assert second["num_computed_tokens"] + second["num_reused_tokens"] == second["num_prompt_tokens"]
    assert first["num_reused_tokens"] == 0
    assert first["reuse_method"] == "rotate_query"
    assert 0 < second["ttft_s"] <= second["e2e_s"]


def test_stream_and_json_give_the_same_answer(model, folder):
    options = ("-m", model, "-d", folder, "--max-tokens", 8)
    streamed = ask(*options, "what is alpha").stdout_bytes.decode()
    assert streamed == ask_json(*options, "what is alpha")[0]["answer"] + "\n"


def test_engine_options_reach_the_engine(model, folder):
    options = ("-m", model, "-d", folder, "--max-tokens", 2, "--max-chunk-len", 5)
    (answer,) = ask_json(*options, "--reuse-method", "full_recompute", "what is alpha")
    assert answer["reuse_method"] == "full_recompute"
    assert {item["status"] for item in answer["documents"]} == {"computed"}
    assert max(item["chunk_index"] for item in answer["documents"]) > 0


def test_top_k_chooses_per_question(model, folder):
    answers = ask_json("-m", model, "-d", folder, "--top-k", 1, "--max-tokens", 2, "eta?", "gamma?", "zeta?")
    assert [item["documents"][0]["document_id"].rsplit("/")[-1] for item in answers] == ["c.txt", "a.txt", "b.md"]
    assert [len(item["documents"]) for item in answers] == [1, 1, 1]


def test_top_k_works_on_passages_of_long_documents(model, tmp_path):
    (tmp_path / "long.txt").write_text("\n\n".join(f"paragraph{i} " + "word " * 8 for i in range(6)))
    (answer,) = ask_json(
        "-m", model, "-d", tmp_path, "--top-k", 1, "--max-chunk-len", 40, "--max-tokens", 2, "paragraph4"
    )
    (document,) = answer["documents"]
    assert "long.txt#" in document["document_id"]
    assert document["num_tokens"] <= 60


def test_questions_come_from_standard_input(model, folder):
    answers = ask_json("-m", model, "-d", folder, "--max-tokens", 2, input="first question\n\nsecond question\n")
    assert [item["question"] for item in answers] == ["first question", "second question"]


def test_interactive_asks_until_the_end_of_input(model, folder):
    result = ask("-m", model, "-d", folder, "--max-tokens", 2, "-i", input="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr.count("question>") == 3
    assert "hit" in result.stderr


def test_a_question_without_documents_is_allowed(model):
    (answer,) = ask_json("-m", model, "--max-tokens", 2, "--system", "be brief", "hello")
    assert answer["documents"] == []


def test_sampling_options_reach_the_sampler(model):
    options = ("-m", model, "--max-tokens", 12, "--temperature", 5, "hello")
    seeded = [ask_json("--seed", seed, *options)[0]["answer"] for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_documents_takes_all_existing_paths_after_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert spread_documents(["-d", "a.txt", "b.md", "what?", "c.txt"]) == [
        *("-d", "a.txt", "--documents", "b.md", "what?", "c.txt")
    ]
    assert spread_documents(["--documents", "a.txt", "--json", "b.md"]) == ["--documents", "a.txt", "--json", "b.md"]
    assert spread_documents(["what?", "-d", "nowhere", "x" * 5000]) == ["what?", "-d", "nowhere", "x" * 5000]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-d", "nowhere", "q"], "nowhere does not exist"),
        (["--block-size", "3", "q"], "block_size must be a power of two, got 3"),
        (["--encoding", "utf-8", "q"], "encoding must be one of after_preamble, isolated"),
        (["--temperature", "0", "--top-p", "7", "q"], "top_p"),
        (["-m", "./nowhere", "q"], "'./nowhere' does not exist"),
        (["-d", ".", "--text-encoding", "utf-9", "q"], "encoding 'utf-9' is not known"),
        (["--reuse-method", "rotate_qery", "q"], "did you mean 'rotate_query'"),
        (["--adapter", "nowhere", "q"], "adapter"),
        (["--dtype", "float17", "q"], "dtype"),
        (["--device", "tpu:0", "q"], "device"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(args, message, model, monkeypatch, folder):
    monkeypatch.chdir(folder)
    result = ask(*args) if "-m" in args else ask("-m", model, *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--blok-size", "3", "q"], "--block-size"),
        (["--top-k", "0", "q"], "--top-k"),
        (["--max-tokens", "many", "q"], "--max-tokens"),
    ],
)
def test_wrong_flags_are_refused_with_a_hint(args, message):
    result = ask(*args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_unknown_retriever_is_named(model, folder):
    result = ask("-m", model, "-d", folder, "--top-k", 1, "--retriever", "bm26", "q")
    assert result.exit_code == 2
    assert "--retriever must be one of bm25, embedding, got 'bm26'" in result.stderr


def test_question_too_long_for_the_model_says_how_long(model):
    result = ask("-m", model, "word " * 2000)
    assert result.exit_code == 2
    assert "max_model_len" in result.stderr


def test_debug_shows_the_traceback_wherever_it_stands(folder):
    for args in (["--debug", "ask", "-d", "nowhere", "q"], ["ask", "-d", "nowhere", "--debug", "q"]):
        result = RUN.invoke(app, args)
        assert type(result.exception).__name__ == "NotFoundError"


def test_failure_that_is_no_misuse_exits_with_1_and_interruption_with_130(monkeypatch):
    def fail(error):
        def describe():
            raise error

        monkeypatch.setattr("lazyattention.cli.environment.printable_environment", describe)
        return RUN.invoke(app, ["env"])

    result = fail(UnsupportedError("no such [thing]; do that"))
    assert (result.exit_code, result.stderr) == (1, "error: no such [thing]; do that\n")
    result = fail(PermissionError(13, "Permission denied", "some/file"))
    assert (result.exit_code, result.stderr) == (1, "error: Permission denied: 'some/file'\n")
    assert type(fail(OSError("no file is named: a fault of ours")).exception) is OSError
    result = fail(KeyboardInterrupt())
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


def test_every_engine_option_has_a_flag_and_help():
    help_text = RUN.invoke(app, ["ask", "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).stdout
    assert "reuse_method" in engine_fields()
    for name, (field, _) in engine_fields().items():
        assert f"--{name.replace('_', '-')}" in help_text
        assert field.metadata["help"] in help_text


def test_a_switch_that_is_off_has_no_default_to_print():
    result = RUN.invoke(app, ["ask", "--help"], env={"COLUMNS": "200"})
    assert "--calibrated" in result.stdout
    assert "(False)" not in result.stdout


@pytest.mark.parametrize("words", [["unlearn"], ["unlearn", "run"], ["documents", "list"], ["quality"]])
def test_every_command_answers_to_both_spellings_of_help(words):
    short, long = (
        RUN.invoke(app, [*words, flag], prog_name="lazyattention", env={"COLUMNS": "200"}) for flag in ("-h", "--help")
    )
    assert short.exit_code == long.exit_code == 0, short.stderr
    assert short.stdout == long.stdout
    assert f"Usage: lazyattention {' '.join(words)}" in long.stdout
    assert "completion" not in long.stdout  # an option of `lazyattention` itself


def test_models_prints_the_matrix():
    rows = json.loads(RUN.invoke(app, ["models", "--json"]).stdout)
    assert any(row["model_type"] == "llama" and row["refused"] is None for row in rows)
    assert any(row["model_type"] == "gpt2" and "positions" in row["refused"] for row in rows)
    table = RUN.invoke(app, ["models"]).stdout
    assert "Refused at load" in table
    assert all(row["model_type"] in table for row in rows)


def test_env_names_versions_and_hardware():
    facts = json.loads(RUN.invoke(app, ["env", "--json"]).stdout)
    assert facts["torch"] in RUN.invoke(app, ["env"]).stdout
    assert {"lazyattention", "python", "transformers", "cpu", "memory", "accelerator"} <= facts.keys()


def test_version():
    from lazyattention import __version__

    assert RUN.invoke(app, ["--version"]).stdout == f"lazyattention {__version__}\n"


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from lazyattention.cli import main\n"
        "try: main(['ask', '--help'])\n"
        "except SystemExit as end: code = end.code\n"
        "slow = {'torch', 'transformers', 'numpy', 'matplotlib'} & sys.modules.keys()\n"
        "sys.exit(f'exit {code}, imported {slow}' if code or slow else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_unlearn_passes_arguments_errors_and_exit_codes_through(monkeypatch):
    inner = typer.Typer()

    @inner.command()
    def go(code: int, text: str = ""):
        if text:
            raise RequestError(text)
        raise typer.Exit(code)

    monkeypatch.setattr("lazyattention.unlearn.cli.unlearn_app", inner)
    assert RUN.invoke(app, ["unlearn", "0"]).exit_code == 0
    assert RUN.invoke(app, ["unlearn", "3"]).exit_code == 3
    result = RUN.invoke(app, ["unlearn", "3", "--text", "wrong"])
    assert (result.exit_code, result.stderr) == (2, "error: wrong\n")
    assert RUN.invoke(app, ["unlearn", "many"]).exit_code == 2
    assert "--text" in RUN.invoke(app, ["unlearn", "--help"]).stdout
