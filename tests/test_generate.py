"""Answers come from the model's own template and end where a turn ends; greedy ones are the model's argmax."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.export.runs import write_base, write_run
from tuner.errors import DataError, RecipeError
from tuner.export.hf import export_hf
from tuner.generate import Generator, Prompt, Sampling, answer_all, load_generator
from tuner.model.adapter import LoraSpec

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
CHAT = Prompt("w10 w11", messages=({"role": "user", "content": "w10 w11"},))
PLAIN = Prompt("w10 w11", text="w10 w11")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    base = write_base(tmp_path / "base", "llama-tied")
    return export_hf(write_run(tmp_path / "run", base)).path


@pytest.fixture
def generator(export: Path) -> Generator:
    return load_generator(str(export))


def test_template_is_applied_unless_the_prompt_is_plain_text(generator: Generator) -> None:
    assert generator.tokenizer.decode(generator.encode(CHAT)) == "user w10 w11 assistant"
    assert generator.tokenizer.decode(generator.encode(PLAIN)) == "w10 w11"
    with pytest.raises(RecipeError, match="empty"):
        generator.encode(Prompt("", text=""))


def test_greedy_is_the_argmax_without_a_cache(generator: Generator) -> None:
    ids = generator.encode(CHAT)
    expected: list[int] = []
    while len(expected) < 6:
        with torch.no_grad():
            token = int(generator.model(torch.tensor([ids + expected]), use_cache=False).logits[0, -1].argmax())
        if token in generator.eos_ids:
            break
        expected.append(token)
    text = generator.answer(CHAT, Sampling(max_new_tokens=6))
    assert text == generator.tokenizer.decode(expected, skip_special_tokens=True)


def test_every_end_of_turn_stops(generator: Generator) -> None:
    assert generator.eos_ids == (2, 3)
    first = generator.model(torch.tensor([generator.encode(CHAT)])).logits[0, -1].argmax()
    generator.eos_ids = (2, int(first))
    assert generator.answer(CHAT, Sampling(max_new_tokens=6)) == generator.tokenizer.decode(
        [int(first)], skip_special_tokens=True
    )


def test_sampling_follows_the_seed(generator: Generator) -> None:
    state = torch.random.get_rng_state()
    one, two, three = (
        list(answer_all(generator, [CHAT, PLAIN], Sampling(12, temperature=2.0, seed=seed))) for seed in (1, 1, 2)
    )
    assert one == two != three
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_prompt_as_long_as_the_model_is_refused(generator: Generator) -> None:
    with pytest.raises(RecipeError, match="the model takes 128"):
        generator.answer(Prompt("long", text="w10 " * 128), Sampling())


def test_kept_adapter_needs_its_base(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "qwen3")
    run = write_run(tmp_path / "run", base, LoraSpec(4, 8.0, 0.0, "all-linear"))
    kept = export_hf(run, tmp_path / "kept", dtype="fp32", adapter="keep").path
    merged = export_hf(run, tmp_path / "merged", dtype="fp32").path
    with pytest.raises(RecipeError, match="does not name its base"):
        load_generator(str(kept))
    sampling = Sampling(max_new_tokens=8)
    answer = load_generator(str(kept), base=str(base)).answer(CHAT, sampling)
    assert answer == load_generator(str(merged)).answer(CHAT, sampling)


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="neither a run"):
        load_generator(str(tmp_path))
    with pytest.raises(RecipeError, match="no such directory"):
        load_generator(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(DataError, match="cannot be loaded"):
        load_generator(str(tmp_path))
