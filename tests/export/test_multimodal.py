"""The language model of a multimodal checkpoint: built without the rest, trained, and put back where it was."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tests.export.runs import LORA, PROMPTS, recorded, write_run, write_tokenizer
from tests.fixtures.tables import cases
from tests.fixtures.trainings import launch
from tests.model.tiny import FAMILIES, VOCAB
from tuner.api.exports import export_hf
from tuner.errors import DataError, RecipeError, VerificationError
from tuner.export import form, verify
from tuner.generate import Prompt, Sampling, load_generator
from tuner.model.adapter import LoraSpec
from tuner.model.build import ModelSpec, build_model, is_part, meta_model, model_config
from tuner.model.multimodal import untouched_facts
from tuner.model.quantize.codes import Kind
from tuner.run.options import LaunchOptions

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURES = SMALL | {"image_size": 8, "patch_size": 4}
KINDS = ("gemma3", "mistral3")
RECIPE: Any = cases(__file__, "recipe")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_check", "ignore:Model has `tie_word_embeddings=True`")


def whole_config(kind: str) -> transformers.PretrainedConfig:
    if kind == "gemma3":
        text = transformers.Gemma3TextConfig(**FAMILIES["gemma3"][1], tie_word_embeddings=True)
        vision = {"model_type": "siglip_vision_model", **PICTURES}
        return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    shape = FAMILIES["mistral"][1]
    vision = {"model_type": "pixtral", "head_dim": 8, **PICTURES}
    return transformers.Mistral3Config(
        text_config={"model_type": "mistral", **shape}, vision_config=vision, tie_word_embeddings=False
    )


def write_whole(directory: Path, kind: str) -> Path:
    """A whole checkpoint in several files, with a tokenizer, a processor's file and a tensor that no class reads."""
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(whole_config(kind), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory, max_shard_size="30KB")
    write_tokenizer(directory)
    (directory / "preprocessor_config.json").write_text('{"image_processor_type": "Siglip", "size": 8}\n')
    return directory


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint that nothing changes."""
    return write_whole(tmp_path_factory.mktemp("gemma3") / "whole", "gemma3")


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, gemma: Path) -> Path:
    kind = request.param
    return gemma if kind == "gemma3" else write_whole(tmp_path_factory.mktemp(kind) / "whole", kind)


@pytest.fixture
def own_gemma(gemma: Path, tmp_path: Path) -> Path:
    """One that its test may change."""
    return shutil.copytree(gemma, tmp_path / "whole")


@pytest.fixture(scope="module")
def adapted(gemma: Path) -> Path:
    """A run that trained an adapter on it; what a test exports of it goes elsewhere."""
    return run_of(gemma, gemma.parent / "adapted", LORA)


@pytest.fixture(scope="module")
def quantised(gemma: Path) -> Path:
    return run_of(gemma, gemma.parent / "quantised", LORA, "bf16", "nf4")


@pytest.fixture(scope="module")
def kept(adapted: Path) -> Path:
    """That adapter as peft has it."""
    return export_hf(adapted, adapted.parent / "kept", adapter="keep", dtype="fp32").path


def left(directory: Path) -> dict[str, Any]:
    model = meta_model(model_config(ModelSpec(str(directory))), torch.float32)
    return untouched_facts(model, str(directory), None)


def run_of(
    base: Path, run: Path, lora: LoraSpec | None = None, frozen: str = "fp32", quantize: Kind | None = None
) -> Path:
    model = model_config(ModelSpec(str(base))).to_dict()
    facts = {"untouched": left(base), "config": model}
    return write_run(run, base, lora, frozen=frozen, facts=facts, quantize=quantize)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


def is_language(name: str) -> bool:
    return "language_model" in name or "lm_head" in name


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    return verify.last_logits(model.eval(), PROMPTS)


def load_whole(directory: Path) -> transformers.PreTrainedModel:
    auto: Any = transformers.AutoModelForImageTextToText
    model: transformers.PreTrainedModel = auto.from_pretrained(directory, dtype=torch.float32)
    return model


def test_only_the_language_model_is_built(whole: Path) -> None:
    model = build_model(ModelSpec(str(whole)), torch.float32, 0)
    assert is_part(model) and all(is_language(name) for name, _ in model.named_parameters())
    plain = dict(load_whole(whole).named_parameters())
    assert plain.keys() > dict(model.named_parameters()).keys()
    assert all(torch.equal(p, plain[name]) for name, p in model.named_parameters())
    there = sum(t.numel() for name, t in tensors(whole).items() if not is_language(name))
    assert sum(model.left_out.values()) == there


@pytest.mark.slow("mistral3")
def test_full_training_is_put_back(whole: Path, tmp_path: Path) -> None:
    run = run_of(whole, tmp_path / "run")
    report = export_hf(run, dtype="fp32", shard_size="50KB")
    before, after = tensors(whole), tensors(report.path)
    assert before.keys() == after.keys() and report.weight_files > 1
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) != is_language(name), name
    assert verify.compare(recorded(run), logits(load_whole(report.path))).relative <= 1e-5
    assert (report.path / "preprocessor_config.json").read_bytes() == (whole / "preprocessor_config.json").read_bytes()
    there, here = (json.loads((path / "config.json").read_text()) for path in (whole, report.path))
    assert here == there
    card = (report.path / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and "what is no part of the language model" in card


def test_bf16_keeps_what_is_not_trained_in_its_type(gemma: Path, tmp_path: Path) -> None:
    report = export_hf(run_of(gemma, tmp_path / "run"))
    for name, tensor in tensors(report.path).items():
        assert tensor.dtype == (torch.bfloat16 if is_language(name) else torch.float32), name
    assert json.loads((report.path / "config.json").read_text())["dtype"] == "bfloat16"


def respelled(directory: Path, rename: Callable[[str], str], tied: bool = False) -> None:
    """Names of the whole checkpoint in another spelling, in one file; a tied output layer may be written too."""
    old = {rename(name): tensor for name, tensor in tensors(directory).items()}
    if tied:
        embeddings = next(tensor for name, tensor in old.items() if name.endswith("language_model.embed_tokens.weight"))
        old["lm_head.weight"] = embeddings.clone()
    for path in directory.glob("model*"):
        path.unlink()
    save_file(old, directory / "model.safetensors", {"format": "pt"})


def newer(name: str) -> str:
    """The names that the modules have, where published ones are older."""
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return name if name.startswith(("model.", "lm_head")) else f"model.{name}"


def test_the_files_own_names_stay(own_gemma: Path, tmp_path: Path) -> None:
    """Both spellings of transformers are read, and written again; a tied tensor that is there twice stays so."""
    assert any(name.startswith("language_model.model.") for name in tensors(own_gemma))
    respelled(own_gemma, newer, tied=True)
    run = run_of(own_gemma, tmp_path / "run", LORA)
    after = tensors(export_hf(run, dtype="fp32").path)
    assert after.keys() == tensors(own_gemma).keys() and "model.vision_tower.post_layernorm.weight" in after
    assert torch.equal(after["lm_head.weight"], after["model.language_model.embed_tokens.weight"])


def test_adapter_is_merged(gemma: Path, tmp_path: Path) -> None:
    run = run_of(gemma, tmp_path / "run", LORA, "bf16")
    report = export_hf(run, dtype="fp32")
    changed = {name for name, t in tensors(report.path).items() if not torch.equal(t, tensors(gemma)[name])}
    assert all(is_language(name) for name in changed)
    assert sum(name.endswith("q_proj.weight") for name in changed) == 2
    assert verify.compare(recorded(run), logits(load_whole(report.path))).relative <= 1e-4


def test_kept_adapter_fits_the_whole_model_and_not_its_towers(gemma: Path, adapted: Path, kept: Path) -> None:
    model = PeftModel.from_pretrained(load_whole(gemma), str(kept))
    assert not any("lora_" in name and not is_language(name) for name, _ in model.named_parameters())
    assert any("q_proj" in name for name, _ in load_whole(gemma).model.vision_tower.named_modules())
    assert verify.compare(recorded(adapted), logits(model)).relative <= 1e-5


def test_source_that_changed_or_is_gone(own_gemma: Path, tmp_path: Path) -> None:
    run = run_of(own_gemma, tmp_path / "run")
    path = next(p for p in own_gemma.glob("*.safetensors") if any("vision" in name for name in load_file(p)))
    held = load_file(path)
    next(tensor for name, tensor in held.items() if "vision" in name).view(-1)[0] += 1
    save_file(held, path, {"format": "pt"})
    with pytest.raises(DataError, match="images, sound.*changed") as caught:
        export_hf(run)
    assert "model.revision" in str(caught.value.hint)
    shutil.rmtree(own_gemma)
    with pytest.raises(DataError, match="not available"):
        export_hf(run)
    assert not (run / "exports" / "step-7").exists()


def test_damaged_copy_is_not_published(gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(gemma, tmp_path / "run")
    real = form.WholeModel.outputs

    def other(self: form.WholeModel, *given: Any) -> list[Any]:
        made = real(self, *given)
        parts = ("vision", "layernorm", "bias")
        first, second, *_ = [at for at, output in enumerate(made) if all(part in output.name for part in parts)]
        made[first] = replace(made[first], source=made[second].source)
        return made

    monkeypatch.setattr(form.WholeModel, "outputs", other)
    with pytest.raises(VerificationError, match="was not trained, and differs"):
        export_hf(run)
    assert not (run / "exports" / "step-7").exists()


def test_random_weights_are_of_the_language_model_alone(gemma: Path, tmp_path: Path) -> None:
    spec = ModelSpec(str(gemma), random_init=True)
    assert model_config(spec).model_type == "gemma3_text"
    model = build_model(spec, torch.float32, 0)
    assert type(model).__name__ == "Gemma3ForCausalLM" and not is_part(model)


def test_config_and_reward(gemma: Path) -> None:
    changed = model_config(ModelSpec(str(gemma), config_overrides={"rms_norm_eps": 0.5}))
    assert (changed.model_type, changed.text_config.rms_norm_eps) == ("gemma3", 0.5)
    with pytest.raises(RecipeError, match="a score on the language model of a multimodal checkpoint"):
        model_config(ModelSpec(str(gemma), head="score"))


def test_answers_of_a_checkpoint_an_export_and_an_adapter(adapted: Path, kept: Path, tmp_path: Path) -> None:
    merged = export_hf(adapted, tmp_path / "merged", dtype="fp32").path
    prompt, sampling = Prompt("", text="w20 w30 w40"), Sampling(max_new_tokens=6)
    answers = []
    for path in (adapted, merged, kept):
        generator = load_generator(str(path))
        assert not any("vision" in name for name, _ in generator.model.named_parameters())
        answers.append(generator.answer(prompt, sampling))
    assert len(set(answers)) == 1
    ids = torch.tensor([generator.encode(prompt)])
    expected = load_whole(merged).generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert generator.tokenizer.decode(expected[0, ids.shape[1] :]).startswith(answers[0])


@pytest.mark.slow("mistral3")
def test_language_model_alone(whole: Path, tmp_path: Path) -> None:
    run = run_of(whole, tmp_path / "run", LORA)
    kind = "Gemma3ForCausalLM" if "gemma3" in str(whole) else "MistralForCausalLM"
    path = export_hf(run, dtype="fp32", text_only=True).path
    assert path.name == "step-7-text" and not (path / "preprocessor_config.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert type(model).__name__ == kind
    assert verify.compare(recorded(run), logits(model)).relative <= 1e-4
    assert all(name.startswith(("model.", "lm_head.")) for name in tensors(path))
    with pytest.raises(RecipeError, match="fits the whole checkpoint"):
        export_hf(run, adapter="keep", text_only=True)


@pytest.mark.slow
def test_training_from_start_to_end(own_gemma: Path, tmp_path: Path) -> None:
    """New tokens get rows in the whole checkpoint; the source is checked again when the run is resumed."""
    rows = [{"text": " ".join(f"w{20 + (i * 7 + j) % 60}" for j in range(4 + i % 9))} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text(RECIPE)
    first = launch(tmp_path, train__stop_after="1 steps")
    meta = json.loads((first.checkpoint / "manifest.json").read_text())["meta"]["model"]
    assert meta["untouched"] == left(own_gemma) and meta["untouched"]["tensors"] > 20
    path = next(p for p in own_gemma.glob("*.safetensors") if any("vision" in name for name in load_file(p)))
    kept = path.read_bytes()
    held = load_file(path)
    next(tensor for name, tensor in held.items() if "vision" in name).view(-1)[0] += 1
    save_file(held, path, {"format": "pt"})
    with pytest.raises(DataError, match="is not trained of .* changed since"):
        launch(tmp_path, LaunchOptions(resume="must"))
    path.write_bytes(kept)
    done = launch(tmp_path, LaunchOptions(resume="must"))
    after, before = tensors(export_hf(done.run_dir, dtype="fp32").path), tensors(own_gemma)
    grown = {name for name in before if after[name].shape != before[name].shape}
    assert grown == {"language_model.model.embed_tokens.weight"}
    config = json.loads((done.run_dir / "exports/step-2/config.json").read_text())
    assert config["text_config"]["vocab_size"] == VOCAB + 1
    assert all(torch.equal(after[name], before[name]) for name in before if not is_language(name))


@pytest.mark.slow("how1", "how2", "how3")
@pytest.mark.parametrize("how", [{}, {"adapter": "keep", "dtype": "fp32"}, {"text_only": True}, {"base": "original"}])
def test_a_quantised_language_model_goes_back_into_its_whole(quantised: Path, tmp_path: Path, how: Any) -> None:
    report = export_hf(quantised, tmp_path / "out", **how)
    assert report.base == (None if "adapter" in how else how.get("base", "quantized"))
    assert report.kl_original is not None and report.kl_quantized is not None
    assert report.kl_quantized < report.kl_original
