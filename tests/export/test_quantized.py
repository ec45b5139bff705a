"""Exports of adapters that were trained on a quantised base: onto which base, how far each answers, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.export.runs import LORA, PROMPTS, copied, once, recorded, write_base, write_run
from tuner.api.exports import export_hf
from tuner.cli.main import main
from tuner.errors import DataError, RecipeError, VerificationError
from tuner.export import verify, weights
from tuner.export.outputs import ExportedValues
from tuner.export.verify import POSITIONS
from tuner.generate import load_generator
from tuner.model.adapter import LoraSpec
from tuner.model.quantize.codes import Kind, Quantized, dequantize, quantize

CLOSE = 0.02
DORA = LoraSpec(4, 8.0, 0.0, "all-linear", use_dora=True, modules_to_save=("*.0.mlp",))
MLP = "model.layers.0.mlp.up_proj.weight"
HEADS = "model.layers.1.self_attn.q_proj.weight"
MakeRun = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


def on_grid(weight: torch.Tensor) -> torch.Tensor:
    """A weight that eight bits hold as it is."""
    parts = (weight / weight.abs().amax(1, keepdim=True) * 127).round()
    parts[:, 0] = 127
    return parts / 1024


def with_outliers(weight: torch.Tensor) -> torch.Tensor:
    """A weight whose rows have one number each that is so large that 4-bit codes of the others are mostly zero."""
    planted = weight.clone()
    planted[:, 3] = 3.0
    return planted


def planted(base: Path, plant: object) -> Path:
    """Replace the weights of the base's linear layers."""
    assert callable(plant)
    path = base / "model.safetensors"
    held = load_file(path)
    made = {name: plant(held[name].float()).bfloat16() for name in held if "_proj" in name}
    save_file(held | made, path, metadata={"format": "pt"})
    return base


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """Makes each run once, next to its base; nothing changes them."""

    def write(place: Path, kind: Kind, lora: LoraSpec, plant: object) -> Path:
        base = write_base(place / "base", "llama-tied", torch.bfloat16)
        if plant is not None:
            planted(base, plant)
        return write_run(place / "run", base, lora, frozen="bf16", quantize=kind)

    return once(write, tmp_path_factory)


@pytest.fixture
def make_run(made: MakeRun, tmp_path: Path) -> MakeRun:
    """Makes the run of a test, next to a copy of its base: a copy, too."""
    return lambda kind, lora=LORA, plant=None: copied(made(kind, lora, plant), tmp_path)


def written(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_where_codes_lose_much_the_quantised_base_is_taken(make_run: MakeRun) -> None:
    run = make_run("nf4", plant=with_outliers)
    report = export_hf(run)
    assert report.base == "quantized" and report.kl_original is not None and report.kl_quantized is not None
    assert report.kl_quantized <= CLOSE < report.kl_original
    assert report.kl_tokens == sum(min(len(prompt), POSITIONS) for prompt in PROMPTS)
    loaded = AutoModelForCausalLM.from_pretrained(report.path, dtype=torch.float32).eval()
    assert verify.compare(recorded(run), verify.last_logits(loaded, PROMPTS)).relative <= CLOSE
    assert report.kept is not None and report.kept > 0.9
    exact = export_hf(run, run / "exact", dtype="fp32")
    assert exact.max_relative_difference is not None and exact.max_relative_difference <= 1e-5
    assert exact.kl_quantized == 0
    again = export_hf(run)
    assert again.already_exported and (again.base, again.kl_original) == (report.base, report.kl_original)


def test_where_codes_lose_nothing_the_original_base_is_taken(make_run: MakeRun) -> None:
    report = export_hf(make_run("int8", plant=on_grid))
    assert (report.base, report.kl_original) == ("original", report.kl_quantized)


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.slow), "fp32"])
def test_either_base_can_be_asked_for(make_run: MakeRun, tmp_path: Path, dtype: str) -> None:
    run = make_run("nf4", DORA)
    original = export_hf(run, run / "a", dtype=dtype, base="original")  # type: ignore[arg-type]
    other = export_hf(run, run / "b", dtype=dtype, base="quantized")  # type: ignore[arg-type]
    assert (original.base, other.base, original.kl_original) == ("original", "quantized", other.kl_original)
    base, first, second = written(tmp_path / "base"), written(original.path), written(other.path)
    held = quantize(base[HEADS].bfloat16(), "nf4")
    assert torch.equal(first["model.embed_tokens.weight"], second["model.embed_tokens.weight"])
    assert torch.equal(first[MLP], second[MLP])  # trained in full: not of the base
    assert not torch.equal(first[HEADS], second[HEADS])
    seen = {name: tensor.float() for name, tensor in (("a", first[HEADS]), ("b", second[HEADS]))}
    plain = {"a": base[HEADS].bfloat16().float(), "b": dequantize(held.codes, held.scales, held.columns)}
    lengths = {name: torch.linalg.vector_norm(weight, dim=1) for name, weight in seen.items()}
    assert torch.allclose(lengths["a"], lengths["b"], rtol=1e-2)  # DoRA's own
    for name, weight in plain.items():
        rest = seen[name] - weight * (seen[name] * weight).sum(1, keepdim=True) / (weight * weight).sum(1, keepdim=True)
        assert float(rest.norm() / seen[name].norm()) < 0.9


def test_an_original_base_that_leaves_nothing_of_the_training_is_refused(
    make_run: MakeRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run("nf4", plant=with_outliers)
    with pytest.raises(SystemExit) as ended:
        main(["export-hf", str(run), "--base", "original"])
    assert ended.value.code == 6
    said = capfd.readouterr().err
    assert "nothing of it is left" in said and "export with --base quantized" in said
    assert list((run / "exports").iterdir()) == []


@pytest.mark.parametrize("how", [{}, pytest.param({"base": "original"}, marks=pytest.mark.slow), {"adapter": "keep"}])
def test_codes_of_a_layer_that_are_swapped_are_found(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, how: dict[str, str]
) -> None:
    run = make_run("nf4")

    def swapped(weight: torch.Tensor, kind: Kind, name: str) -> Quantized:
        found = quantize(weight, kind, name)
        return Quantized(found.codes.flip(0), found.scales, found.columns) if name == HEADS else found

    monkeypatch.setattr(weights, "quantize", swapped)
    with pytest.raises(VerificationError) as failure:
        export_hf(run, **how)  # type: ignore[arg-type]
    assert failure.value.exit_code == 6
    assert list((run / "exports").iterdir()) == []


def test_what_is_written_is_what_was_measured(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ExportedValues.merged
    monkeypatch.setattr(ExportedValues, "merged", lambda self, dtype: right(_other(self), dtype))
    with pytest.raises(VerificationError, match="not the one that was measured"):
        export_hf(make_run("nf4"), base="original")


def _other(values: ExportedValues) -> ExportedValues:
    values._base = weights.quantized_base(values._source, values._trained.plain)
    return values


def test_a_kept_adapter_says_what_it_was_trained_on(make_run: MakeRun) -> None:
    run = make_run("nf4", plant=with_outliers)
    report = export_hf(run, run.parent / "kept", adapter="keep", dtype="fp32")
    assert report.base is None and report.kl_quantized == 0 and (report.kl_original or 0) > CLOSE
    facts = json.loads((report.path / "tuner.json").read_text())["quantized_base"]
    assert (facts["kind"], facts["dtype"], facts["left_out"], facts["merged_into"]) == ("nf4", "bf16", [], None)
    text = (report.path / "README.md").read_text()
    assert "4 bits (nf4)" in text and "BitsAndBytesConfig(load_in_4bit=True" in text
    model = load_generator(str(report.path)).model
    assert verify.compare(recorded(run), verify.last_logits(model, PROMPTS)).relative <= 1e-5


def test_a_run_answers_as_it_was_trained(make_run: MakeRun) -> None:
    run = make_run("int8", DORA)
    model = load_generator(str(run)).model
    assert verify.compare(recorded(run), verify.last_logits(model, PROMPTS)).relative <= 1e-5


def test_both_figures_are_printed(make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run("nf4")
    with pytest.raises(SystemExit) as ended:
        main(["export-hf", str(run), "--base", "quantized", "--json"])
    assert ended.value.code == 0
    found = capfd.readouterr()
    metrics = json.loads(found.out)["metrics"]
    assert metrics["base"] == "quantized" and metrics["kl_original"] > metrics["kl_quantized"]
    assert f"{metrics['kl_quantized']:.2g} nats a token on the quantised base" in found.err
    assert f"{metrics['kl_original']:.2g} on the original one" in found.err
    facts = json.loads((run / "exports" / "step-7" / "tuner.json").read_text())
    assert facts["quantized_base"]["kl"] == {name: metrics[f"kl_{name}"] for name in ("original", "quantized")}
    assert facts["export"]["base"] == "quantized"
    assert "| merged into | the quantised base" in (run / "exports" / "step-7" / "README.md").read_text()


def stored_as_codes(base: Path) -> Path:
    """Have a base's files hold what bitsandbytes would write of it in 8 bits."""
    config = json.loads((base / "config.json").read_text())
    about = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    found = dict[str, torch.Tensor]()
    for name, weight in load_file(base / "model.safetensors").items():
        found[name] = weight
        if "_proj" in name:
            held = quantize(weight, "int8")
            found[name], found[name.removesuffix("weight") + "SCB"] = held.codes, held.scales[:, 0].clone()
    save_file(found, base / "model.safetensors", {"format": "pt"})
    return base


@pytest.mark.slow
def test_a_base_that_was_published_as_codes_has_no_other(tmp_path: Path) -> None:
    base = stored_as_codes(write_base(tmp_path / "base", "llama-tied", torch.bfloat16))
    run = write_run(tmp_path / "run", base, DORA, frozen="bf16", quantize="int8")
    with pytest.raises(RecipeError, match="--base original: .* holds int8 codes, and no other weights"):
        export_hf(run, base="original")
    report = export_hf(run, run / "merged")
    assert (report.base, report.kl_original) == ("quantized", None)
    kept = export_hf(run, run / "kept", adapter="keep", dtype="fp32")
    assert kept.max_relative_difference is not None and kept.max_relative_difference <= 1e-5
    model = load_generator(str(run)).model
    assert verify.compare(recorded(run), verify.last_logits(model, PROMPTS)).relative <= 1e-5
    held = load_file(base / "model.safetensors")
    held[HEADS][3, 5] += 1
    save_file(held, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="the base model changed since"):
        export_hf(run)


def test_there_is_no_choice_without_a_quantised_base(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", write_base(tmp_path / "base", "llama-tied"), LORA)
    with pytest.raises(RecipeError, match="--base original: the run's base was not quantised"):
        export_hf(run, base="original")
    with pytest.raises(RecipeError, match="--base: a kept adapter is merged into no base"):
        export_hf(run, base="original", adapter="keep")
    assert export_hf(run).base is None
    assert "base" not in json.loads((run / "exports" / "step-7" / "tuner.json").read_text())["export"]
