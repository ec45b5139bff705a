"""Exports load in plain transformers and peft and answer as the trained model; anything else publishes nothing."""

import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.export import runs
from tests.export.runs import LORA, PROMPTS, answers, contents, copied, once, recorded, write_base, write_run
from tests.fixtures.bits import flip_bit
from tests.fixtures.tables import cases
from tests.rundir import made
from tuner.api.exports import export_hf
from tuner.checkpoint.load import read_probe, read_tensors
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.cli.main import main
from tuner.errors import DataError, MemoryLimitError, RecipeError, VerificationError
from tuner.export import hf, outputs, tensors, verify
from tuner.export.card import curve
from tuner.export.hf import ExportReport
from tuner.export.plan import ExportOptions, plan_export
from tuner.export.source import resolve, warn_of_better
from tuner.export.tensors import OpenFiles, Output, Shards, Written, held_tensor
from tuner.export.verify import Answers, kept, uniform
from tuner.export.weights import read_config
from tuner.export.write import write_config, write_tokenizer
from tuner.model import vetting
from tuner.model.adapter import LoraSpec

DTYPE_WORDS = {"bf16": "bfloat16", "fp32": "float32"}
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:`is_gradient_checkpointing`")
MakeRun = Callable[..., Path]


def some(*quick: object, of: Iterable[Any]) -> list[Any]:
    """Cases of which these are taken in each run of the tests, and the others are `slow`."""
    several = [case if isinstance(case, tuple) else (case,) for case in of]
    chosen = [case if isinstance(case, tuple) else (case,) for case in quick]
    return [pytest.param(*case, marks=() if case in chosen else pytest.mark.slow) for case in several]


@pytest.fixture(scope="module")
def runs_made(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """Makes each run once, next to its base; nothing changes them."""

    def write(place: Path, kind: str, *how: Any) -> Path:
        return write_run(place / "run", write_base(place / "base", kind), *how)

    return once(write, tmp_path_factory)


@pytest.fixture
def make_run(runs_made: MakeRun, tmp_path: Path) -> MakeRun:
    """Makes the run of a test next to its base: copies, which a test may change, of one whose base is elsewhere."""

    def make(
        kind: str = "llama-tied",
        lora: LoraSpec | None = None,
        frozen: str = "fp32",
        probes: bool = True,
        freeze: tuple[str, ...] = (),
        amount: float = 0.05,
    ) -> Path:
        return copied(runs_made(kind, lora, probes, frozen, freeze, amount), tmp_path)

    return make


@pytest.fixture
def make_own_run(tmp_path: Path) -> MakeRun:
    """The same with a base of its own, next to it."""
    return lambda kind, *how, **more: write_run(tmp_path / "run", write_base(tmp_path / "base", kind), *how, **more)


VARIANTS = {
    "lora": LORA,
    "rslora": LoraSpec(4, 8.0, 0.0, "all-linear", use_rslora=True),
    "dora": LoraSpec(4, 8.0, 0.0, "all-linear", use_dora=True),
    "head": LoraSpec(4, 8.0, 0.0, "all-linear", modules_to_save=("lm_head",)),
    "all": LoraSpec(
        4, 8.0, 0.0, ("*.1.*attn.*",), use_rslora=True, use_dora=True, modules_to_save=("lm_head", "*.0.mlp")
    ),
}


KINDS_OF_LAYERS, TYPES = ("llama", "llama-tied", "gpt2"), ("fp32", "bf16")
QUICK = (("lora", "llama-tied", "bf16"), ("dora", "llama-tied", "fp32"), ("head", "llama-tied", "fp32"))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("variant", "kind", "frozen"), some(*QUICK, of=itertools.product(VARIANTS, KINDS_OF_LAYERS, TYPES))
)
def test_every_adapter_is_exported_merged_and_kept(make_run: MakeRun, variant: str, kind: str, frozen: str) -> None:
    run = make_run(kind, VARIANTS[variant], frozen)
    merged = export_hf(run, run / "merged", dtype="fp32")
    assert verify.compare(recorded(run), answers(merged.path)).relative <= 1e-5
    kept = export_hf(run, run / "kept", dtype="fp32", adapter="keep")
    assert kept.max_difference is not None
    assert kept.max_difference <= 1e-6
    base = AutoModelForCausalLM.from_pretrained(run.parent / "base", dtype=torch.float32)
    base.to(torch.bfloat16 if frozen == "bf16" else torch.float32).float()  # as it was held
    model = PeftModel.from_pretrained(base, str(kept.path)).eval()
    assert verify.compare(recorded(run), verify.last_logits(model, PROMPTS)).relative <= 1e-5
    facts = json.loads((kept.path / "adapter_config.json").read_text())
    spec = VARIANTS[variant]
    assert (facts["use_rslora"], facts["use_dora"]) == (spec.use_rslora, spec.use_dora)
    if spec.modules_to_save:
        assert "lm_head" in facts["modules_to_save"]
        assert facts["ensure_weight_tying"] == (kind != "llama")


@pytest.mark.parametrize("fault", [{"scale": 4.04}, {"length": None}])
def test_a_wrong_merge_is_not_published(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, fault: dict[str, object]
) -> None:
    run = make_run("llama", VARIANTS["all"])
    right = outputs.LowRank
    monkeypatch.setattr(outputs, "LowRank", lambda **facts: right(**facts | fault))
    with pytest.raises(VerificationError, match="numbers are not the trained ones, rounded once to float32"):
        export_hf(run, dtype="fp32")


def test_an_adapter_that_peft_would_not_take_is_not_published(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("llama", VARIANTS["dora"])
    right = outputs.peft_name
    monkeypatch.setattr(outputs, "peft_name", lambda name: right(name).replace("lora_magnitude_vector", "lora_length"))
    with pytest.raises(VerificationError, match="peft does not take"):
        export_hf(run, adapter="keep")


@pytest.mark.parametrize("kind", some("llama-tied", of=KINDS_OF_LAYERS))
def test_frozen_parameters_come_from_the_base(make_run: MakeRun, kind: str) -> None:
    frozen = ("*.0.*", "lm_head")
    run = make_run(kind, freeze=frozen)
    trained = {name for name, _ in read_tensors(open_checkpoint(run / "checkpoints" / "step-7"))}
    assert trained
    assert not [name for name in trained if ".0." in name or "lm_head" in name]
    report = export_hf(run, dtype="fp32")
    assert verify.compare(recorded(run), answers(report.path)).relative <= 1e-6
    base, written = (load_file(place / "model.safetensors") for place in (run.parent / "base", report.path))
    layer = "transformer.h.0.mlp.c_fc.weight" if kind == "gpt2" else "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(base[layer], written[layer])
    assert not torch.equal(base[layer.replace(".0.", ".1.")], written[layer.replace(".0.", ".1.")])


def test_chosen_weights_are_written_in_float32(make_own_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, chosen = make_own_run("llama"), ["lm_head", "layers.0.*norm"]
    report = export_hf(run, keep_fp32=chosen)
    written = load_file(report.path / "model.safetensors")
    wide = {name for name, tensor in written.items() if tensor.dtype == torch.float32}
    norms = {f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")}
    assert wide == {"lm_head.weight"} | norms
    trained = dict(read_tensors(open_checkpoint(run / "checkpoints" / "step-7")))
    assert torch.equal(written["lm_head.weight"], trained["model/lm_head.weight"])
    assert json.loads((report.path / "tuner.json").read_text())["export"]["keep_fp32"] == chosen
    with pytest.raises(RecipeError, match="holds another export"):
        export_hf(run)
    with pytest.raises(RecipeError, match=r"--keep-fp32: 'lm_hed' matches nothing"):
        export_hf(run, run.parent / "other", keep_fp32=["lm_hed"])
    with pytest.raises(RecipeError, match="written in one type"):
        export_hf(run, adapter="keep", keep_fp32=chosen)
    monkeypatch.setattr(outputs, "exact_names", lambda source, plain: set())  # and the verification holds it to them
    with pytest.raises(VerificationError, match="not the trained ones"):
        export_hf(run, run.parent / "rounded", keep_fp32=chosen)


@pytest.mark.parametrize("kept", some("bf16", of=TYPES))
def test_the_base_model_is_never_held_in_memory(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    run = make_run("llama-tied", LORA, kept)
    runs.without_the_base_in_memory(monkeypatch)
    lengths = []
    read = OpenFiles.read

    def noted(files: OpenFiles, path: Path, start: int, count: int) -> torch.Tensor:
        lengths.append(count)
        return read(files, path, start, count)

    monkeypatch.setattr(OpenFiles, "read", noted)
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1000)
    assert export_hf(run).path.is_dir()
    of_files = (run.parent / "base" / "model.safetensors").stat().st_size
    assert sum(lengths) > 2.8 * of_files  # for its hash, to be merged, and to be compared
    assert sorted(lengths)[-4] <= 2000 < of_files  # its header, read each time, is longer


def test_shards_tokenizer_and_generation_config(make_run: MakeRun) -> None:
    run = make_run("qwen3")
    report = export_hf(run, shard_size=20_000)
    assert report.path == run / "exports" / "step-7"
    assert (report.probes, report.probes_recorded, report.step) == (3, True, 7)
    assert report.weight_files > 1 and (report.path / "model.safetensors.index.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(report.path)
    assert tokenizer.chat_template == runs.TEMPLATE
    facts = json.loads((report.path / "generation_config.json").read_text())
    assert facts["eos_token_id"] == [2, 3]
    config = json.loads((report.path / "config.json").read_text())
    assert config["use_cache"] is True and config["architectures"] == ["Qwen3ForCausalLM"]
    assert "tuner_packed" not in (report.path / "config.json").read_text()


def test_no_local_path_but_an_adapters_base(make_own_run: MakeRun, tmp_path: Path) -> None:
    """A kept adapter names a local base model by its path, so that it loads, unless it is given another name."""
    report = export_hf(make_own_run("llama", LORA), adapter="keep")
    held = [name for name, data in contents(report.path).items() if str(tmp_path).encode() in data]
    assert held == ["adapter_config.json"]  # of others the test of the card says so


@pytest.mark.parametrize("adapter", ["merge", "keep"])
def test_same_bytes_and_no_op(make_run: MakeRun, adapter: str, tmp_path: Path) -> None:
    run = make_run("llama-tied", LORA)
    first = export_hf(run, tmp_path / "a", adapter=adapter)  # type: ignore[arg-type]
    second = export_hf(run / "checkpoints" / "step-7", tmp_path / "b", adapter=adapter)  # type: ignore[arg-type]
    assert contents(first.path) == contents(second.path)
    before = {p: p.stat().st_mtime_ns for p in first.path.rglob("*")}
    again = export_hf(run, tmp_path / "a", adapter=adapter)  # type: ignore[arg-type]
    assert again.already_exported and again.max_difference is None
    assert before == {p: p.stat().st_mtime_ns for p in first.path.rglob("*")}


def test_another_directory_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("keep me")
    with pytest.raises(RecipeError, match="not this export"):
        export_hf(run, target)
    assert (target / "notes.txt").read_text() == "keep me"
    export_hf(run, tmp_path / "a")
    with pytest.raises(RecipeError, match="another export"):
        export_hf(run, tmp_path / "a", dtype="fp32")
    (tmp_path / "a" / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match="config.json"):
        export_hf(run, tmp_path / "a")


def flip(checkpoint: Path, tensor: str) -> Path:
    """Turn one bit of a tensor in a checkpoint's file, which is returned."""
    [chunk] = open_checkpoint(checkpoint).index()[tensor].chunks
    path = checkpoint / chunk.file
    flip_bit(path, chunk.start + chunk.length // 2, 4)
    return path


def test_a_damaged_checkpoint_is_a_data_error(make_run: MakeRun) -> None:
    run = make_run()
    checkpoint = run / "checkpoints" / "step-7"
    shard = flip(checkpoint, "model/model.layers.1.mlp.up_proj.weight")
    for given in (run, checkpoint):
        with pytest.raises(DataError, match=rf"{shard.name}.*model.layers.1.mlp.up_proj.weight"):
            export_hf(given)
    assert not list((run / "exports").iterdir())


DAMAGE: Any = cases(__file__, "damage")


@pytest.mark.parametrize("name", DAMAGE)
def test_a_flipped_bit_anywhere_in_a_checkpoint_is_a_data_error(make_run: MakeRun, name: str) -> None:
    run = make_run()
    path = run / "checkpoints" / "step-7" / name
    if "missing" in DAMAGE[name]:
        path.unlink()
    else:
        flip_bit(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=re.escape(DAMAGE[name])):
        export_hf(path.parent)
    assert not (run / "exports").exists()


@pytest.mark.parametrize("change", ["another", "missing", "new"])
def test_a_tokenizer_that_is_not_the_runs_is_refused(make_run: MakeRun, change: str) -> None:
    run = make_run()
    path = run / "tokenizer" / ("added.txt" if change == "new" else "tokenizer.json")
    if change == "missing":
        path.unlink()
    else:
        path.write_text(path.read_text().replace("w50", "w_50") if path.exists() else "new")
    with pytest.raises(DataError, match=rf"{path.name}: the tokenizer changed") as failure:
        export_hf(run)
    assert failure.value.exit_code == 3
    assert not list((run / "exports").iterdir())


@pytest.mark.parametrize(
    ("adapter", "probes"),
    some(("merge", True), ("keep", False), of=itertools.product(("merge", "keep"), (True, False))),
)
def test_a_changed_base_model_is_refused(make_own_run: MakeRun, adapter: str, probes: bool) -> None:
    run = make_own_run("llama", LORA, probes, "bf16")
    flip_bit(run.parent / "base" / "model.safetensors")
    with pytest.raises(DataError, match="the base model changed") as failure:
        export_hf(run, adapter=adapter)  # type: ignore[arg-type]
    assert failure.value.exit_code == 3
    assert not list((run / "exports").iterdir())


def test_transformers_4_reads_tokenizer_and_rotary_positions(make_run: MakeRun) -> None:
    run = make_run("llama")
    config = run / "tokenizer" / "tokenizer_config.json"
    facts = json.loads(config.read_text()) | {"extra_special_tokens": ["w7"], "tokenizer_class": "TokenizersBackend"}
    config.write_text(json.dumps(facts))
    given = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    written, old = run / "written", {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["w7"]}
    written.mkdir()
    write_tokenizer(written, resolve(run))
    found = json.loads((written / "tokenizer_config.json").read_text())
    assert "extra_special_tokens" not in found and found == found | old
    assert AutoTokenizer.from_pretrained(written)("w7 w8")["input_ids"] == [7, 8]
    read = read_config(resolve(run))
    read.rope_parameters = given
    write_config(written, read, "LlamaForCausalLM", torch.float32)
    said = json.loads((written / "config.json").read_text())
    assert (said["rope_theta"], said["rope_scaling"]) == (5000.0, {"rope_type": "linear", "factor": 2.0})
    assert AutoConfig.from_pretrained(written).rope_parameters == given


def test_an_adapter_on_a_tied_head_is_exported_apart(make_own_run: MakeRun) -> None:
    run = make_own_run("llama-tied", LoraSpec(4, 8.0, 0.0, ("q_proj", "lm_head")))
    with pytest.raises(RecipeError, match="lm_head.weight is adapted and tied") as refused:
        export_hf(run)
    assert refused.value.hint == "keep it by itself: tuner export-hf RUN --adapter keep"
    assert export_hf(run, adapter="keep").kept is not None


def test_of_two_sets_of_base_weights_the_one_that_was_trained_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, shard, said = write_base(tmp_path / "base", "llama"), "model-00001-of-00001.safetensors", list[str]()
    right = load_file(base / "model.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in right.items()}, base / shard, {"format": "pt"})
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(right, shard)}))
    monkeypatch.setattr(vetting, "pass_on", said.append)
    run = write_run(tmp_path / "run", base, LORA)
    assert len(said) == 1 and "model.safetensors is read, as by transformers, and not the files" in said[0]
    written = load_file(export_hf(run, dtype="fp32").path / "model.safetensors")
    assert torch.equal(written["model.embed_tokens.weight"], right["model.embed_tokens.weight"])


def test_a_changed_base_matters_where_something_was_frozen_alone(make_own_run: MakeRun) -> None:
    run = make_own_run("llama", left_alone=("lm_head",))
    write_base(run.parent / "base", "qwen3")
    with pytest.raises(DataError, match="the base model changed"):
        export_hf(run)


def test_a_base_model_changed_after_full_training_is_of_no_account(make_own_run: MakeRun) -> None:
    run = make_own_run("llama")
    (run.parent / "base" / "model.safetensors").unlink()
    report = export_hf(run)
    assert report.dtype == "fp32" and "nobody knows what bf16 would keep" in report.rounding()
    assert export_hf(run, run / "named", dtype="bf16").kept is None


def test_damage_of_what_is_not_exported_does_no_harm(make_run: MakeRun) -> None:
    run = make_run()
    optimizer = [name for name in open_checkpoint(run / "checkpoints" / "step-7").index() if "exp_avg" in name]
    flip(run / "checkpoints" / "step-7", optimizer[0])
    assert export_hf(run).path.is_dir()


@pytest.mark.parametrize(
    ("dtype", "lora"), some(("fp32", LORA), ("bf16", None), of=itertools.product(TYPES, (None, LORA)))
)
def test_base_weights_fail(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, dtype: Literal["fp32", "bf16"], lora: LoraSpec | None
) -> None:
    run = make_run("llama", lora, amount=0.3 if lora else 0.05)
    base = load_file(run.parent / "base" / "model.safetensors")
    merged = outputs.ExportedValues.merged

    def untrained(values: outputs.ExportedValues, kind: torch.dtype) -> list[Output]:
        return [Output(output.name, kind, held_tensor(base[output.name])) for output in merged(values, kind)]

    monkeypatch.setattr(outputs.ExportedValues, "merged", untrained)
    with pytest.raises(VerificationError, match="numbers are not the trained ones"):
        export_hf(run, dtype=dtype)
    assert not list((run / "exports").iterdir())


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "bf16"), ("gpt2", "fp32")])
def test_tampered_files_are_not_published(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    run = make_run(kind)
    write = hf.write_shards

    def tampered(directory: Path, shards: Shards) -> dict[str, Written]:
        written = write(directory, shards)
        flip_bit(directory / "model.safetensors")
        return written

    monkeypatch.setattr(hf, "write_shards", tampered)
    with pytest.raises(VerificationError, match="other bytes"):
        export_hf(run, dtype=dtype)  # type: ignore[arg-type]
    assert list((run / "exports").iterdir()) == []


def test_probes_of_another_model_fail(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("qwen3")
    read = verify.read_probe
    monkeypatch.setattr(
        verify, "read_probe", lambda info: {k: v + 1e-3 if k == "logits" else v for k, v in read(info).items()}
    )
    for dtype in ("fp32", "bf16"):  # which rounding would not show, and bf16's own does not hide
        with pytest.raises(VerificationError, match="not the trained model"):
            export_hf(run, dtype=dtype)


@pytest.mark.slow("0.0002-lora2-fp32")
@pytest.mark.parametrize(
    ("amount", "lora", "taken"), [(0.05, LORA, "bf16"), (2e-4, LORA, "fp32"), (2e-4, VARIANTS["dora"], "fp32")]
)
def test_auto_takes_the_type_that_keeps_what_was_trained(
    make_run: MakeRun, capfd: pytest.CaptureFixture[str], amount: float, lora: LoraSpec, taken: str
) -> None:
    run = make_run("llama", lora, "bf16", amount=amount)
    report = export_hf(run)
    assert (report.dtype, report.auto_dtype) == (taken, taken)
    assert json.loads((report.path / "config.json").read_text())["dtype"] == DTYPE_WORDS[taken]
    facts, card = json.loads((report.path / "tuner.json").read_text()), (report.path / "README.md").read_text()
    assert facts["export"]["dtype"] == taken
    assert (" | kept | " in card.replace("\n", " ")) == (taken == "bf16")
    for again in ("auto", taken):
        assert export_hf(run, dtype=again).already_exported  # type: ignore[arg-type]
    if taken == "bf16":
        assert report.kept is not None and report.kept > 0.9 and report.remedy() == ""
        return
    assert report.kept is None and report.bf16_kept is not None and report.bf16_kept < 0.8
    assert "bf16 would keep" in report.rounding() and f"| bf16 would keep | {report.bf16_kept:.0%}" in card
    with pytest.raises(SystemExit) as ended:
        main(["export-hf", str(run), "--dtype", "bf16", "--output", str(run / "named"), "--json"])
    said = json.loads(capfd.readouterr().out)
    assert ended.value.code == 0 and said["metrics"]["kept"] == report.bf16_kept
    (warned,) = said["warnings"]
    assert f"bf16 keeps {report.bf16_kept:.0%} of what training changed" in warned
    command, checkpoint, *options = shlex.split(warned.partition("this keeps it: tuner ")[2])
    assert (command, options[::2]) == ("export-hf", ["--dtype", "--output"])
    assert export_hf(checkpoint, options[3], dtype=options[1]).dtype == "fp32"  # type: ignore[arg-type]


def test_weights_that_nobody_changed_keep_everything() -> None:
    rows = torch.randn(5, 9).log_softmax(-1)
    same = Answers(rows, rows)
    assert kept(same, same, same).share == 1
    assert kept(same, same, uniform(same)).share == 0
    half = Answers(rows, (0.5 * rows).log_softmax(-1))
    assert 0 < kept(uniform(same), same, half).share < 1
    assert kept(uniform(same), same, Answers(rows, rows * float("nan"))).share == 0


def test_without_recorded_probes_the_checkpoint_itself_answers(make_run: MakeRun) -> None:
    report = export_hf(make_run("llama", LORA, probes=False))
    assert report.probes == 8 and not report.probes_recorded


def test_one_checkpoint_of_several_is_chosen(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "llama")
    run = write_run(tmp_path / "run", base, best=3)
    steps = {step: replaced_step(run, step) for step in (3, 5)}
    for chosen, path in (("newest", run / "checkpoints" / "step-7"), ("best", steps[3]), (5, steps[5])):
        assert plan_export(run, step=chosen).source.checkpoint.path == path  # type: ignore[arg-type]
    warned: list[str] = []
    plan_export(run, warn=warned.append)
    better = "step 3 has a lower held-out loss (1.000); to export that one, add --step best"
    assert warned == [f"step 7 is exported, but {better}"]
    for chosen in ("best", 5):
        plan_export(run, warn=pytest.fail, step=chosen)  # type: ignore[arg-type]
    plan_export(steps[5], warn=pytest.fail)
    assert export_hf(run, step="best").path == run / "exports" / "step-3"
    with pytest.raises(RecipeError, match="one checkpoint: --step"):
        plan_export(steps[5], step="best")
    with pytest.raises(DataError, match="step-4"):
        plan_export(run, step=4)
    with pytest.raises(RecipeError, match="no best checkpoint"):
        plan_export(write_run(tmp_path / "other", base), step="best")
    flip(steps[3], "model/model.norm.weight")
    with pytest.raises(DataError, match="step-3"):
        export_hf(run, tmp_path / "again", step="best")


def test_without_a_best_one_the_losses_of_kept_steps_are_compared(tmp_path: Path) -> None:
    lines = [made.eval_line(3, 1.5), made.eval_line(4, 0.5), made.eval_line(5, 1.75), made.eval_line(7, 2.0)]
    warned: list[str] = []
    run = made.run(tmp_path / "run", lines)
    for step in (3, 5, 7):
        weights = {"model/w": torch.zeros(2)}
        save(CheckpointDir(run / "checkpoints", "test"), step, weights, {"step": step}, {"model": {}})
    warn_of_better(resolve(run, step=7), warned.append)
    better = "step 3 has a lower held-out loss (1.500); to export that one, add --step 3"
    assert warned == [f"step 7 is exported, but {better}"]
    warn_of_better(resolve(run, step=3), pytest.fail)


def replaced_step(run: Path, step: int) -> Path:
    """Another checkpoint of the run, the same tensors under another step."""
    there = open_checkpoint(run / "checkpoints" / "step-7")
    tensors, probe = dict(read_tensors(there)), read_probe(there)
    return save(CheckpointDir(run / "checkpoints", "test"), step, tensors, {"step": step}, there.meta, probe)


def test_wrong_arguments(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    with pytest.raises(RecipeError, match="no such directory"):
        plan_export(tmp_path / "nothing")
    with pytest.raises(RecipeError, match="neither a run"):
        plan_export(tmp_path / "base")
    with pytest.raises(RecipeError, match="no adapter"):
        plan_export(run, options=ExportOptions(adapter="keep"))
    plan = plan_export(run)
    assert not plan.done and not (run / "exports").exists()


METRICS = [
    {"kind": "eval", "step": 0, "loss": 3.25, "eval_s": 0.5},
    *(
        {"kind": "train", "step": n, "tokens": 100 * n, "loss": 3 - n / 10, "lr": 1e-4, "step_s": 1.0}
        for n in range(1, 31)
    ),
    {"kind": "eval", "step": 7, "loss": 2.5, "eval_s": 0.7},
]


@pytest.mark.parametrize("adapter", ["merge", "keep"])
def test_the_card_tells_where_the_weights_come_from(make_own_run: MakeRun, adapter: str, tmp_path: Path) -> None:
    run = make_own_run("llama", LORA, facts={"licence": "apache-2.0"})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS) + '{"kind": "tr')
    base = "owner/name" if adapter == "keep" else None
    report = export_hf(run, adapter=adapter, base_model=base)  # type: ignore[arg-type]
    text = (report.path / "README.md").read_text()
    front = text.split("---\n")[1].splitlines()
    assert "license: apache-2.0" in front
    assert ("library_name: peft" in front) == (adapter == "keep")
    for said in cases(__file__, "said_by_the_card"):
        assert said in text, said
    facts = json.loads((report.path / "tuner.json").read_text())
    assert [line["step"] for line in facts["metrics"]["train"]] == list(range(1, 8))
    assert not {"step_s", "eval_s"} & {key for lines in facts["metrics"].values() for line in lines for key in line}
    assert facts["data"]["train"]["rows"] == 12
    for path in report.path.rglob("*"):
        data = path.read_bytes()
        assert str(tmp_path).encode() not in data, path
        assert b"s3cret" not in data, path


def test_long_curves_are_thinned_and_end_with_the_last_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    steps = [line["step"] for line in curve(tmp_path, 30)["train"]]
    assert (len(steps), steps[0], steps[-1]) == (12, 1, 30)
    assert steps == sorted(set(steps))
    assert curve(tmp_path / "none", 30) == {"train": [], "eval": []}


def test_the_proof_says_how_close_and_how_close_it_had_to_be() -> None:
    rounded = ExportReport(Path("x"), 4, "bf16", "merge", 9, 1, 100, 12, True, 0.95, 1.0, False, 20, 0.031)
    assert rounded.proof() == (
        "12 probes match the trained model: every tensor is the trained one, rounded to bf16 once; before "
        "rounding, logits agree to 1e-05 of the largest; rounding moves them by at most 3.1% of it"
    )
    exact = replace(rounded, dtype="fp32", probes_recorded=False, max_relative_difference=2.1e-7)
    assert exact.proof() == (
        "12 probes match the checkpoint's model (the run recorded no probes): largest logit difference 2.1e-07 "
        "(limit 1e-05 of the largest logit)"
    )
    assert replace(exact, max_difference=None).proof() == ""


def test_latest_leads_to_the_newest_step_of_the_trained_weights(make_run: MakeRun, tmp_path: Path) -> None:
    exports = make_run("llama-tied") / "exports"
    done = export_hf(exports.parent)
    assert os.readlink(exports / "latest") == done.path.name
    export_hf(exports.parent, tmp_path / "elsewhere")
    assert os.readlink(exports / "latest") == done.path.name
    os.remove(exports / "latest")
    assert export_hf(exports.parent).already_exported and os.readlink(exports / "latest") == done.path.name
    (exports / "step-1000").mkdir()
    (exports / "latest").unlink()
    export_hf(exports.parent)
    assert not (exports / "latest").exists(), "there is a newer one"


def test_verification_that_the_machine_has_no_memory_for(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("llama-tied")
    monkeypatch.setattr(verify, "host_memory", lambda: (100, 100))
    with pytest.raises(MemoryLimitError, match="which takes .* of the host's memory; this machine has 100 bytes"):
        export_hf(run)
    assert not (run / "exports").exists()
