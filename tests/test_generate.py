"""Answers come from the model's own template and end where a turn ends; greedy ones are the model's argmax."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.caches import new_cache
from tests.export.runs import write_base, write_run
from tests.fixtures import forked
from tuner.api.exports import export_hf
from tuner.cli.work.generate import prompts_of
from tuner.errors import DataError, RecipeError
from tuner.generate import Generator, Prompt, Sampling, base_of, base_record, load_generator
from tuner.model.adapter import LoraSpec
from tuner.runtime.files import read_json, sha256_file, write_json

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
CHAT = Prompt("w10 w11", messages=({"role": "user", "content": "w10 w11"},))
PLAIN = Prompt("w10 w11", text="w10 w11")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's export, in the run; no test changes either."""
    place = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNER_CACHE", str(new_cache(place / "cache")))
        return export_hf(write_run(place / "run", write_base(place / "base", "llama-tied"))).path


@pytest.fixture
def generator(export: Path) -> Generator:
    return load_generator(str(export))


def test_a_run_is_rounded_on_its_way_to_a_device_and_what_it_computes_is_not(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = export.parents[1]
    wide = load_generator(str(run)).model
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    monkeypatch.setattr("tuner.generate._device", lambda: (torch.device("cpu"), torch.bfloat16))
    narrow, exported = load_generator(str(run)).model, load_generator(str(export)).model
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    buffers = dict(wide.named_buffers())
    assert buffers and all(torch.equal(buffer, buffers[name]) for name, buffer in narrow.named_buffers())
    assert narrow.get_output_embeddings().weight is narrow.get_input_embeddings().weight
    there = dict(exported.named_parameters())
    assert all(torch.equal(parameter, there[name]) for name, parameter in narrow.named_parameters())


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
        [generator.answer(prompt, Sampling(12, temperature=2.0, seed=seed)) for prompt in (CHAT, PLAIN)]
        for seed in (1, 1, 2)
    )
    assert one == two != three
    assert torch.equal(state, torch.random.get_rng_state())


def test_pieces_are_the_answer_and_ctrl_c_ends_it(generator: Generator) -> None:
    pieces: list[str] = []
    whole = generator.generate(CHAT, Sampling(max_new_tokens=6), pieces.append)
    assert "".join(pieces).strip() == whole.text.strip() == generator.answer(CHAT, Sampling(max_new_tokens=6)).strip()

    def interrupt(text: str) -> None:
        pieces.append(text)
        raise KeyboardInterrupt

    pieces.clear()
    stopped = generator.generate(CHAT, Sampling(max_new_tokens=6), interrupt)
    assert (stopped.text, stopped.cut) == (pieces[0], True)
    assert whole.text.startswith(stopped.text.strip())


def test_an_answer_says_whether_it_was_cut(generator: Generator) -> None:
    cut = generator.generate(CHAT, Sampling(max_new_tokens=3))
    assert (cut.tokens, cut.cut) == (3, True)
    first = generator.model(torch.tensor([generator.encode(CHAT)])).logits[0, -1].argmax()
    generator.eos_ids = (int(first),)
    ended = generator.generate(CHAT, Sampling(max_new_tokens=3))
    assert (ended.tokens, ended.cut) == (1, False)


def test_top_k_and_top_p_limit_what_is_drawn(generator: Generator) -> None:
    greedy = generator.answer(CHAT, Sampling(6))
    assert generator.answer(CHAT, Sampling(6, temperature=5.0, top_k=1)) == greedy
    assert generator.answer(CHAT, Sampling(6, temperature=5.0, top_p=1e-6)) == greedy
    assert generator.answer(CHAT, Sampling(6, temperature=5.0)) != greedy
    with pytest.raises(RecipeError, match="do nothing at temperature 0"):
        generator.answer(CHAT, Sampling(6, top_k=3))


def test_a_prompt_as_long_as_the_model_is_refused(generator: Generator) -> None:
    with pytest.raises(RecipeError, match="the model takes 128"):
        generator.answer(Prompt("long", text="w10 " * 128), Sampling())


def test_kept_adapter_needs_its_base(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "qwen3")
    run = write_run(tmp_path / "run", base, LoraSpec(4, 8.0, 0.0, "all-linear"))
    kept = export_hf(run, dtype="fp32", adapter="keep").path
    assert kept == run / "exports" / "step-7-adapter"
    merged = export_hf(run, tmp_path / "merged", dtype="fp32").path
    sampling = Sampling(max_new_tokens=8)
    answer = load_generator(str(kept)).answer(CHAT, sampling)
    assert answer == load_generator(str(merged)).answer(CHAT, sampling)
    moved = base.rename(tmp_path / "elsewhere")
    with pytest.raises(RecipeError, match="its base model is gone"):
        load_generator(str(kept))
    assert load_generator(str(kept), base=str(moved)).answer(CHAT, sampling) == answer


def test_peft_loads_a_kept_adapter_by_the_base_that_it_names(tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    base = write_base(tmp_path / "base", "llama")
    run = write_run(tmp_path / "run", base, LoraSpec(4, 8.0, 0.0, "all-linear"))
    kept = export_hf(run, adapter="keep").path
    assert read_json(kept / "adapter_config.json")["base_model_name_or_path"] == str(base)
    assert AutoPeftModelForCausalLM.from_pretrained(str(kept)).peft_config["default"].r == 4
    named = export_hf(run, tmp_path / "named", adapter="keep", base_model="owner/name").path
    assert read_json(named / "adapter_config.json")["base_model_name_or_path"] == "owner/name"
    assert export_hf(run, tmp_path / "named", adapter="keep", base_model="owner/name").already_exported
    with pytest.raises(RecipeError, match="holds another export"):
        export_hf(run, tmp_path / "named", adapter="keep")
    with pytest.raises(RecipeError, match="a merged export names no base"):
        export_hf(run, base_model="owner/name")


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="neither a run"):
        load_generator(str(tmp_path))
    with pytest.raises(RecipeError, match="no such directory"):
        load_generator(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(DataError, match="cannot be loaded"):
        load_generator(str(tmp_path))


def test_a_run_answers_as_its_export(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "gemma3")
    run = write_run(tmp_path / "run", base, LoraSpec(4, 8.0, 0.0, "all-linear"))
    exported = export_hf(run, dtype="fp32").path
    answers = {
        load_generator(str(path)).answer(CHAT, Sampling(12)) for path in (run, run / "checkpoints/step-7", exported)
    }
    assert len(answers) == 1 and answers != {""}


def test_base_is_found_by_run_export_or_record(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "llama")
    run = write_run(tmp_path / "run", base)
    inside, outside = export_hf(run).path, export_hf(run, tmp_path / "outside").path
    for place in (run, run / "checkpoints" / "step-7", inside):
        assert base_of(str(place)) == (str(base), None)
    with pytest.raises(RecipeError, match="does not know"):
        base_of(str(outside))
    record = base_record(sha256_file(outside / "tuner.json"))
    record.parent.mkdir(parents=True)
    write_json(record, {"base": str(base), "revision": None})
    assert base_of(str(outside)) == (str(base), None)


def tuner(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tuner.cli.main", *args]
    return forked.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)


def test_commands(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "llama-tied")
    run = write_run(tmp_path / "run", base)
    exported = tuner("export-hf", "-", "--output", str(tmp_path / "out"), stdin=f"{run}\n")
    assert (exported.returncode, exported.stdout) == (0, f"{tmp_path / 'out'}\n")
    assert "verified  3 probes" in exported.stderr
    words = ["--max-new-tokens", "4", "--prompt", "w10 w11"]
    compared = tuner("generate", "-", "--compare", "base", *words, stdin=exported.stdout)
    assert compared.returncode == 0, compared.stderr
    lines = compared.stdout.splitlines()
    assert lines[0].startswith("base      ") and lines[1].startswith("trained   ")
    more = ["--prompt", "w12", "--temperature", "3", "--seed", "5", "--samples", "3", "--json"]
    drawn = tuner("generate", str(run), *words, *more)
    answers = json.loads(drawn.stdout)["artifacts"]["answers"]
    assert [(row["prompt"], row["seed"]) for row in answers] == [(p, s) for p in ("w10 w11", "w12") for s in (5, 6, 7)]
    own = load_generator(str(run)).answer(Prompt("", ({"role": "user", "content": "w12"},)), Sampling(4, 3.0, 7))
    assert answers[5]["trained"] == own and len({row["trained"] for row in answers[3:]}) == 3
    greedy = tuner("generate", str(run), *words, "--samples", "3")
    assert greedy.returncode == 2 and "3 samples at temperature 0 are the same answer" in greedy.stderr
    talk = tuner("chat", str(run), "--temperature", "0", "--max-new-tokens", "4", stdin="w10 w11\nw12\n")
    assert talk.returncode == 0 and talk.stdout.splitlines()[0] == lines[1].removeprefix("trained   ")


def test_a_failed_export_prints_its_document(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", write_base(tmp_path / "base", "llama"))
    (run / "checkpoints" / "step-7" / "state.json").write_text("{}")
    done = tuner("export-hf", str(run / "checkpoints" / "step-7"), "--json")
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] == 3 and "state.json" in document["error"]["message"]
    passed_on = tuner("generate", "-", "--prompt", "w10", "--json", stdin=done.stdout)
    assert passed_on.returncode == 3 and json.loads(passed_on.stdout) == document


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '"w1"\n{"prompt": "w2"}\n'
        '{"messages": [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]}\n'
    )
    prompts = prompts_of([], str(path), "be short", raw=False)
    assert [p.shown for p in prompts] == ["w1", "w2", "w3"]
    assert prompts[2].messages == ({"role": "system", "content": "be short"}, {"role": "user", "content": "w3"})
    path.write_text('"w1"\n{"other": 1}\n')
    with pytest.raises(DataError, match=r"p.jsonl:2: expected text"):
        prompts_of([], str(path), None, raw=False)
