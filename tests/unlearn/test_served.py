# SPDX-License-Identifier: Apache-2.0
"""What `unlearn run` writes is served by the engine under another weights_id, and its documents leave a live store."""

import dataclasses
import json

import pytest
import torch
from qa_fixtures import qa_model, qa_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from fixtures.live_server import live_server, running_engine
from lazyattention import LLM, SamplingParams
from lazyattention.documents.client import DocumentClient
from lazyattention.documents.document import Document
from lazyattention.errors import RequestError
from lazyattention.models.loader import load_model
from lazyattention.unlearn.adapters import load_adapter
from lazyattention.unlearn.cli import unlearn_app
from lazyattention.unlearn.data import generate_people
from lazyattention.unlearn.ledger import read_ledger

QUICK = "-s train.num_epochs=4 -s attribution.num_steps=2 -s optimizer.lr=3e-2 -s guards.max_utility_drop=99 --force"
QUIET = "--metrics none --answers 0"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    qa_model().save_pretrained(folder / "model")
    qa_tokenizer(chat=True).save_pretrained(folder / "model")
    for name, examples in generate_people(8, 0, num_facts=2, forget_fraction=0.25).items():
        rows = [{k: v for k, v in dataclasses.asdict(e).items() if k in ("question", "answer")} for e in examples]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def run(workplace, monkeypatch):
    monkeypatch.chdir(workplace)

    def invoke(output, line):
        line = f"run -m model -f forget.jsonl -r retain.jsonl -o {output} {QUICK} {QUIET} {line}"
        result = CliRunner().invoke(unlearn_app, line.split(), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads((workplace / output / "results.json").read_text())

    return invoke


def greedy(model, tokenizer, question, count):
    """The answer by argmax, token by token, without our engine."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    new = []
    for _ in range(count):
        with torch.no_grad():
            new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return new


def answered(llm, question, count):
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    (output,) = llm.chat([[{"role": "user", "content": question}]], params)
    return list(output.outputs[0].token_ids)


def test_model_and_adapter_are_served_under_weights_ids_of_their_own(run, workplace):
    run("full", "--method simu")
    run("lora", "--method simu-lora --format adapter")
    tokenizer, question = qa_tokenizer(chat=True), "Where was the person born?"
    base = AutoModelForCausalLM.from_pretrained(workplace / "model", dtype=torch.float32).eval()
    expected = {
        "original": greedy(base, tokenizer, question, 8),
        "full": greedy(AutoModelForCausalLM.from_pretrained(workplace / "full/model").eval(), tokenizer, question, 8),
        "lora": greedy(load_adapter(base, workplace / "lora/adapter", "merge").eval(), tokenizer, question, 8),
    }
    llms = {
        "original": LLM(str(workplace / "model"), dtype="float32"),
        "full": LLM(str(workplace / "full/model"), dtype="float32"),
        "lora": LLM(str(workplace / "model"), adapter=str(workplace / "lora/adapter"), dtype="float32"),
    }
    assert {name: answered(llm, question, 8) for name, llm in llms.items()} == expected
    # Else the test could not tell the models apart.
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    assert len({llm.engine.loaded.weights_id for llm in llms.values()}) == 3


def uploaded(client, *names):
    documents = [Document(f"{name} lives by the sea.", id=name) for name in names]
    assert len(list(client.upload(documents, warm=True, pin=False, pin_ttl_s=None, system=None))) == len(names)


def test_documents_leave_the_store_of_a_running_server(run, workplace, monkeypatch):
    with running_engine(load_model(str(workplace / "model"))) as engine, live_server(engine) as server:
        client = DocumentClient(server.url)
        uploaded(client, "forgotten", "kept", "later")
        record = run("now", f"--method simu+none --store forgotten --store absent --store-url {server.url}")
        assert [(e["document_id"], e["status"]) for e in record["purge"]["documents"]] == [
            ("forgotten", "deleted"),
            ("absent", "not stored"),
        ]
        assert record["purge"]["documents"][0]["num_freed_bytes"] > 0
        assert {entry["id"] for entry in client.list()} == {"kept", "later"}
        assert read_ledger(workplace / "ledger.jsonl")[-1]["purge"] == record["purge"]

        # Nobody answers at that address: the model is written, the purge waits, and says so.
        record = run("pending", "--method simu+none --request-id r2 --store later --store-url http://127.0.0.1:9")
        assert record["purge"]["status"] == "pending"
        assert "PENDING for later: no server at http://127.0.0.1:9" in (workplace / "pending/report.html").read_text()
        assert {entry["id"] for entry in client.list()} == {"kept", "later"}
        purge = f"purge --store-url {server.url}".split()
        result = CliRunner().invoke(unlearn_app, purge, catch_exceptions=False)
        assert result.output.startswith("r2: later deleted (1 chunks")
        assert {entry["id"] for entry in client.list()} == {"kept"}
        entry = read_ledger(workplace / "ledger.jsonl")[-1]
        assert (entry["event"], entry["request_id"], entry["status"]) == ("purge", "r2", "done")
        assert "nothing is pending" in CliRunner().invoke(unlearn_app, purge, catch_exceptions=False).output
    with pytest.raises(RequestError, match="must begin with http"):
        run("never", "--store kept --store-url nowhere")
    assert not (workplace / "never").exists()
