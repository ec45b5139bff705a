"""Tokens that a recipe added: their rows are in every export, exactly, and load in plain transformers and peft."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.export.mixtures import merged_state
from tests.export.runs import LORA, save_run, train_a_little, write_tokenizer
from tests.model.tiny import VOCAB, family_model
from tuner.api.exports import export_hf
from tuner.checkpoint.open import open_checkpoint
from tuner.errors import RecipeError
from tuner.export import verify
from tuner.export.verify import last_logits
from tuner.generate import Prompt, Sampling, load_generator
from tuner.model.adapter import LoraSpec
from tuner.model.build import ModelSpec, build_model
from tuner.model.tokens import trainable_tokens
from tuner.model.trainable import TrainableSpec

GROWN, ROOM = range(VOCAB, VOCAB + 3), range(VOCAB - 3, VOCAB)
SAVED = LoraSpec(4, 8.0, 0.0, "all-linear", modules_to_save=("lm_head",))
CHOICES = {
    "full": TrainableSpec(),
    "lora": TrainableSpec(LORA),
    "saved": TrainableSpec(SAVED),
    "frozen": TrainableSpec(frozen=("input",)),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out", "ignore:`is_gradient_check", "ignore:Model has `tie_word_embeddings=True`"
)


@dataclass
class Case:
    """A trained model with new tokens, its run directory, and prompts that hold them."""

    run: Path
    trained: PreTrainedModel
    prompts: list[list[int]]
    kind: tuple[str, bool]

    def merged(self) -> dict[str, torch.Tensor]:
        """Every tensor as it shall be published in float32, made by other means."""
        plain = family_model(*self.kind)
        plain.resize_token_embeddings(max(VOCAB, self.trained.config.vocab_size), mean_resizing=False)
        state = merged_state(self.trained)
        for name, layer in trainable_tokens(self.trained).items():
            new = state.pop(f"{name}.new_rows")
            state[f"{name}.weight"][layer.first :][: len(new)] = new
        plain.load_state_dict(state)
        plain.save_pretrained(self.run.parent / "expected")
        return load_file(self.run.parent / "expected" / "model.safetensors")


def make(directory: Path, family: str, tied: bool, choice: TrainableSpec, new_ids: range, frozen: str = "fp32") -> Case:
    base, run = directory / "base", directory / "run"
    family_model(family, tied).save_pretrained(base)
    dtype = torch.bfloat16 if frozen == "bf16" else torch.float32
    trained = build_model(ModelSpec(str(base), new_ids=new_ids), dtype, seed=0)
    left_alone = ("wte" if family == "gpt2" else "embed_tokens",) if choice.frozen else ()
    chosen = TrainableSpec(choice.adapter, left_alone, new_ids)
    chosen.apply(trained, seed=0)
    train_a_little(trained, 0.2)
    write_tokenizer(run / "tokenizer", max(VOCAB, new_ids.stop))
    section = {"name_or_path": str(base), "dtype": frozen, "config": {}, "freeze": list(left_alone)}
    prompts = [[5, new_ids[0], 7], [new_ids[1], new_ids[2]], [9, 10, 11]]
    ids = {"new_ids": [new_ids.start, new_ids.stop]}
    save_run(run, base, trained, choice.adapter, section, prompts, of_model=ids)
    return Case(run, trained, prompts, (family, tied))


def answers(model: torch.nn.Module, prompts: list[list[int]]) -> torch.Tensor:
    return last_logits(model.eval(), prompts)


MERGED = [("llama", choice, new_ids) for choice in CHOICES for new_ids in (GROWN, ROOM)]
MERGED += [(family, "lora", GROWN) for family in ("gpt2", "gemma3", "phi", "qwen3-moe")]
MERGED += [("phi", "frozen", ROOM), ("gpt2", "saved", GROWN)]


QUICK = {
    ("llama", "full", GROWN, True),
    ("gpt2", "lora", GROWN, True),
    ("phi", "frozen", ROOM, True),
    ("gemma3", "lora", GROWN, False),
}
"""What each run of the tests exports; the other cases are slow."""
CASES = [(*case, tied) for case in MERGED for tied in (True, False)]


@pytest.mark.parametrize(
    ("family", "choice", "new_ids", "tied"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_merged_exports_hold_the_rows(tmp_path: Path, family: str, tied: bool, choice: str, new_ids: range) -> None:
    case = make(tmp_path, family, tied, CHOICES[choice], new_ids)
    report = export_hf(case.run, dtype="fp32")
    assert report.max_difference is not None and report.probes_recorded
    written, expected = load_file(report.path / "model.safetensors"), case.merged()
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    model = AutoModelForCausalLM.from_pretrained(report.path, dtype=torch.float32)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(report.path)) == max(VOCAB, new_ids.stop)
    assert verify.compare(answers(case.trained, case.prompts), answers(model, case.prompts)).relative <= 1e-5
    rounded = load_file(export_hf(case.run, tmp_path / "rounded", dtype="bf16").path / "model.safetensors")
    assert all(torch.equal(rounded[name], expected[name].to(torch.bfloat16)) for name in expected)


KEPT = [("llama", "lora", GROWN), ("llama", "saved", ROOM), ("gpt2", "saved", GROWN), ("gemma3", "lora", ROOM)]


@pytest.mark.parametrize(
    ("family", "choice", "new_ids", "tied"),
    [
        pytest.param(*case, tied, marks=() if case[1] == "lora" and tied == (case[2] == ROOM) else pytest.mark.slow)
        for case in KEPT
        for tied in (True, False)
    ],
)
def test_adapters_hold_the_rows_alone(tmp_path: Path, family: str, tied: bool, choice: str, new_ids: range) -> None:
    case = make(tmp_path, family, tied, CHOICES[choice], new_ids)
    report = export_hf(case.run, dtype="fp32", adapter="keep")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    base.resize_token_embeddings(case.trained.config.vocab_size)
    model = PeftModel.from_pretrained(base, str(report.path))
    assert verify.compare(answers(case.trained, case.prompts), answers(model, case.prompts)).relative <= 1e-5
    size = case.trained.config.vocab_size
    assert f"base.resize_token_embeddings({size})" in (report.path / "README.md").read_text()
    shapes = [tensor.shape for tensor in load_file(report.path / "adapter_model.safetensors").values()]
    apart = (1 if tied else 2) if choice == "lora" else (0 if tied else 1)
    assert shapes.count((3, 32)) == apart
    assert sum(shape[0] == size for shape in shapes) == (0 if choice == "lora" else 2 if tied else 1)


@pytest.mark.slow("untied")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_base_held_in_bfloat16_adds_no_rounding_to_them(tmp_path: Path, tied: bool) -> None:
    case = make(tmp_path, "gemma3", tied, CHOICES["lora"], GROWN, frozen="bf16")
    report = export_hf(case.run, dtype="fp32")
    written = load_file(report.path / "model.safetensors")
    for name, layer in trainable_tokens(case.trained).items():
        if f"{name}.weight" in written:
            assert torch.equal(written[f"{name}.weight"][GROWN.start :], layer.new_rows)
            assert torch.equal(written[f"{name}.weight"][: GROWN.start], layer.base_layer.weight[:VOCAB])
    assert export_hf(case.run, tmp_path / "kept", adapter="keep", dtype="fp32").max_difference is not None


def test_a_checkpoint_holds_what_is_trained_alone(tmp_path: Path) -> None:
    case = make(tmp_path, "llama", False, CHOICES["lora"], GROWN)
    index = open_checkpoint(case.run / "checkpoints" / "step-7").index()
    names = {name for name in index if "lora_" not in name and "optimizer" not in name}
    assert names == {"model/model.embed_tokens.new_rows", "model/lm_head.new_rows"}


def test_what_peft_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    case = make(tmp_path, "phi", False, CHOICES["lora"], ROOM)
    with pytest.raises(RecipeError, match="leaves out the bias"):
        export_hf(case.run, adapter="keep")
    facts = json.loads((export_hf(case.run).path / "tuner.json").read_text())
    assert facts["source"]["step"] == 7


def test_run_and_exports_answer_alike(tmp_path: Path) -> None:
    case = make(tmp_path, "gemma3", False, CHOICES["lora"], GROWN)
    places = [case.run, export_hf(case.run, dtype="fp32").path]
    places.append(export_hf(case.run, tmp_path / "kept", dtype="fp32", adapter="keep").path)
    prompt = Prompt("p", text=f"w10 w{GROWN[0]} w{GROWN[2]} w11")
    answers = {load_generator(str(path), base=str(tmp_path / "base")).answer(prompt, Sampling(12)) for path in places}
    assert len(answers) == 1 and answers != {""}
