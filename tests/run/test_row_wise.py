"""A training with a row-wise embedding, stopped and resumed, is one that was never stopped; its export is a model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.fixtures.trainings import launch, lines, outcome, saved
from tuner.api.exports import export_hf
from tuner.checkpoint.load import read_tensors
from tuner.errors import RecipeError

RECIPE = """\
model: {name_or_path: ./model}
tokenizer: {name_or_path: byte}
data: {train: rows.jsonl, max_length: 64, packing: false}
train: {duration: 3 steps, global_batch_size: 4, micro_batch_size: 2, precision: fp32, device: cpu}
optimizer: {lr: 1e-2, weight_decay: 0.1, rows: [embed_tokens]}
checkpoint: {every: 4 steps}
logging: {level: warning}
"""
NAME = "model.embed_tokens.weight"


@pytest.fixture
def directory(workplace: Path) -> Path:
    config = LlamaConfig.from_pretrained(workplace / "model", tie_word_embeddings=False)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(workplace / "model")
    (workplace / "r.yaml").write_text(RECIPE)
    return workplace


def test_a_run_that_was_stopped_is_one_that_was_not(directory: Path) -> None:
    whole = launch(directory, name="whole")
    launch(directory, name="parts", train__stop_after="2 steps")
    parts = launch(directory, "auto", name="parts")
    assert outcome(parts.run_dir) == outcome(whole.run_dir)
    tensors = dict(read_tensors(saved(parts.run_dir)))
    before = LlamaForCausalLM.from_pretrained(directory / "model").state_dict()[NAME]
    counts = tensors[f"optimizer/row_updates/{NAME}"]
    untouched = counts == 0
    assert untouched.sum() > 200 and counts.max() == 3, "bytes that no row has, and one that every step has"
    assert torch.equal(tensors[f"model/{NAME}"][untouched], before[untouched])
    assert not torch.equal(tensors[f"model/{NAME}"], before)
    assert not tensors[f"optimizer/exp_avg/{NAME}"][untouched].any()
    exported = AutoModelForCausalLM.from_pretrained(export_hf(parts.run_dir, dtype="fp32").path).state_dict()
    assert torch.equal(exported[NAME], tensors[f"model/{NAME}"])
    dense = launch(directory, name="dense", optimizer__rows="[]", train__stop_after="1 step")
    assert lines(dense.run_dir)[0]["grad_norm"] == pytest.approx(lines(whole.run_dir)[0]["grad_norm"], rel=1e-6)
    with pytest.raises(RecipeError, match="optimizer.rows"):
        launch(directory, "auto", name="parts", optimizer__rows="[]", train__duration="4 steps")
