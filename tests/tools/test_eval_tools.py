"""The tools that scores of tasks are held to: what they make, and that they see a difference."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools import eval_plain, eval_tasks
from tuner.api.scores import score_tasks
from tuner.data.encoding.tokenizer_json import byte_tokenizer_files
from tuner.evals.items import read_items


def test_two_of_the_tasks_are_made_without_the_network(tmp_path: Path) -> None:
    eval_tasks.make(tmp_path / "a", 320, sums=False)
    eval_tasks.make(tmp_path / "b", 320, sums=False)
    for name, kind in (("functions", "choice"), ("documentation", "text")):
        items = read_items(tmp_path / "a" / f"{name}.jsonl")
        assert (items.kind, len(items.items)) == (kind, 320) and len(set(items.ids)) == 320
        assert (tmp_path / "a" / f"{name}.jsonl").read_bytes() == (tmp_path / "b" / f"{name}.jsonl").read_bytes()
    assert json.loads((tmp_path / "a" / "made.json").read_text())["files"].keys() == {
        "functions.jsonl", "documentation.jsonl",
    }  # fmt: skip


@pytest.mark.slow
def test_plain_transformers_find_the_same_item_by_item(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for name, data in byte_tokenizer_files().items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(data)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    eval_tasks.make(tmp_path / "tasks", 6, sums=False)
    sums = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "stop": ["\n", "a"]} for i in range(5)]
    (tmp_path / "tasks" / "sums.jsonl").write_text("".join(json.dumps(item) + "\n" for item in sums))
    flags = {"train.precision": "fp32", "train.device": "cpu"}
    tasks = sorted((tmp_path / "tasks").glob("*.jsonl"))
    score_tasks(model, list(map(str, tasks)), overrides=flags, output=tmp_path / "ours", quiet=True)
    plain = eval_plain.Plain(model, 512)
    for task in tasks:
        items = [json.loads(line) for line in task.read_text().splitlines()]
        with torch.no_grad():
            results = [plain.result(item, 64) for item in items]
        ours = [json.loads(line) for line in (tmp_path / "ours" / task.name).read_text().splitlines()]
        problems, largest = eval_plain.differences(results, ours)
        assert problems == [] and largest < eval_plain.NATS
        assert eval_plain.differences(results, ours[1:])[0]
        if "picked" in results[0]:
            wrong = [{**ours[0], "picked": ours[0]["picked"] + 1}, *ours[1:]]
            assert len(eval_plain.differences(results, wrong)[0]) == 1
