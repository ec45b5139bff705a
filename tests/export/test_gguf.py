"""A GGUF file is the trained model in llama.cpp, or it does not appear."""

import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.export import runs
from tests.export.gguf_models import FAMILIES, SPECIAL, TEMPLATE, VOCAB, keys_of, write_model, write_tokenizer, written
from tests.fixtures.commands import tuner
from tuner.errors import DataError, MachineError, RecipeError, TunerError, VerificationError
from tuner.export import tensors
from tuner.export.gguf import architecture, engine, export, file, source, vocabulary  # noqa: E402
from tuner.export.source import TRAINED
from tuner.export.tensors import TensorSource, held_tensor
from tuner.model.adapter import LoraSpec
from tuner.rundir.checkpoints import is_held

for needed in ("gguf", "xllamacpp"):
    pytest.importorskip(needed, reason=f"needs {needed}: pip install gguf xllamacpp")


Keys, Tensors = dict[str, Any], dict[str, TensorSource]


@pytest.fixture(autouse=True)
def _few_texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(export, "N_TEXTS", 20)
    export.fixed.cache_clear()
    yield
    export.fixed.cache_clear()


@pytest.mark.slow(*(family for family in FAMILIES if family not in {"llama", "gemma3_text"}))
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_answers_as_the_trained_model(family: str, tmp_path: Path) -> None:
    """Every family at float32 within rounding; q8_0 with what it costs."""
    report = written(write_model(tmp_path / "model", family), "q8_0", tmp_path / "m.gguf")

    exact, figures = report.exact, report.figures
    assert exact is not None and figures is not None
    assert exact.difference <= 2e-5 + export.STEPS * exact.steps and (exact.steps > 0) == family.startswith("gemma")
    assert exact.greedy == exact.tokens >= 20 and exact.texts > 60 and exact.chats == 3
    assert exact.kl <= figures.kl < 0.2 and "q8_0: KL" in report.proof() and report.better() == "bf16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "model"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_gelu_whose_table_is_not_read_is_as_close_as_any(family: str, tmp_path: Path) -> None:
    """Inputs beyond it: what is left of the difference elsewhere is the table's steps."""

    def beyond(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "gate_proj" in name:
                parameter.data.mul_(4096)

    report = written(write_model(tmp_path / "model", family, beyond), "f32", tmp_path / "m.gguf")
    assert report.exact is not None and max(report.exact.difference, report.exact.steps) < 5e-5


def test_gelu_is_read_off_a_table_of_float16() -> None:
    entries = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        inner = np.float32(math.sqrt(2 / math.pi)) * entries * (1 + np.float32(0.044715) * entries * entries)
        table = (np.float32(0.5) * entries * (1 + np.tanh(inner))).astype(np.float16).astype(np.float32)
    x = np.concatenate([np.random.default_rng(0).normal(0, 3, 20_000), [-10, 10, 11, -11]]).astype(np.float32)
    read = table[x.astype(np.float16).view(np.uint16)]
    wanted = np.where(x <= -10, np.float32(0), np.where(x >= 10, x, read))
    found = architecture.TableGelu()(torch.from_numpy(x)).numpy()
    assert (found == wanted).mean() > 0.95 and np.abs(found - wanted).max() < 1e-4  # of tanh near -1 each has its own


@pytest.mark.slow
@pytest.mark.parametrize("kind", file.TYPES)
def test_every_type_costs_what_is_said(kind: str, tmp_path: Path) -> None:
    report = written(write_model(tmp_path / "model", "qwen2"), kind, tmp_path / "m.gguf")
    assert report.figures is not None
    assert report.figures.kl < {"f32": 1e-9, "f16": 1e-4, "bf16": 2e-3, "q8_0": 2e-3}.get(kind, 0.5)


def test_the_command_says_what_was_measured(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen2")
    done = tuner("export-gguf", "model", "--type", "q8_0", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and done.stdout == f"{tmp_path / 'model-q8_0.gguf'}\n"
    assert "renders 3 chats as trained" in done.stderr and "closer    --type bf16" in done.stderr


def test_a_run_with_an_adapter_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "write_tokenizer", write_tokenizer)
    base = write_model(tmp_path / "base", "llama")
    run = runs.write_run(tmp_path / "run", base, LoraSpec(4, 8.0, 0.0, "all-linear"), amount=0.2)

    write = file.write_gguf

    def watched(*given: Any) -> list[Path]:
        assert is_held(run / "checkpoints" / "step-7")  # or a training would prune it
        return write(*given)

    monkeypatch.setattr(file, "write_gguf", watched)
    report = written(run, "f32", tmp_path / "m.gguf")
    assert report.exact is not None and report.exact.difference <= 2e-5
    keys = keys_of(report.path)
    assert keys["tuner.step"] == "7" and len(keys["tuner.manifest_sha256"]) == 64
    assert keys["tuner.verified"].startswith("llama.cpp") and keys["general.name"] == "tiny"
    with pytest.raises(RecipeError, match=re.escape("m.gguf: exists already")):
        written(run, "f32", report.path)


def unlike(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Keys, Tensors], None]:
    """Tensors whose names end so are other values in the file."""

    def plant(keys: Keys, tensors: Tensors) -> None:
        found = [each for each in tensors if each.endswith(name)]
        assert found
        for each in found:
            tensors[each] = held_tensor(change(tensors[each].whole().clone()))

    return plant


def without(name: str) -> Callable[[Keys, Tensors], None]:
    """A tensor that is not in the file."""
    return lambda keys, tensors: tensors.__delitem__(name)


def keyed(name: str, value: Any) -> Callable[[Keys, Tensors], None]:
    """A key that says something else, or nothing where that is None."""

    def plant(keys: Keys, tensors: Tensors) -> None:
        assert keys.pop(name) != value
        keys.update({} if value is None else {name: value})

    return plant


def lost(keys: Keys, tensors: Tensors) -> None:
    """An added token is a normal one."""
    at = keys["tokenizer.ggml.tokens"].index("<call>")
    keys["tokenizer.ggml.token_type"][at] = 1


def cut_merges(keys: Keys, tensors: Tensors) -> None:
    """Merges after the first hundred are lost."""
    del keys["tokenizer.ggml.merges"][100:]


def halved(weight: torch.Tensor) -> torch.Tensor:
    """Rows of heads of 16 with neighbouring pairs, as halves again; and the other way round."""
    return weight.reshape(-1, 8, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_OF_256 = {"head_dim": 256, "query_pre_attn_scalar": 256}
READ_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": PLAIN_ROPE, "qwen2": {}, "phi3": {}, "lfm2": {}, "qwen3": {**PLAIN_ROPE, "head_dim": 128},
    "qwen3_moe": {"moe_intermediate_size": 768}, "gemma3_text": _OF_256,
    "gemma2": {**_OF_256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}  # fmt: skip
"""Families whose files transformers reads, with what it assumes: it reads no factors, caps and such sizes."""


@pytest.mark.slow(*READ_BY_TRANSFORMERS.keys() - {"qwen2"})
@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_a_file_is_the_model_to_transformers_as_well(family: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", family, **READ_BY_TRANSFORMERS[family])
    written(model, "f32", tmp_path / "m.gguf", verify=False)
    ids = torch.arange(5, 105)[None]
    with torch.no_grad():
        one = AutoModelForCausalLM.from_pretrained(model).eval()(ids).logits
        other = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").eval()(ids).logits
    assert (one - other).abs().max() <= 1e-5 * one.abs().max()


IDS, CHAT, END, MODEL = "other ids", "renders a chat", "does not end a turn", "another model"
FAULTS: dict[str, tuple[str, Callable[[Keys, Tensors], None], str]] = {
    "no permutation": ("llama", unlike("attn_q.weight", halved), MODEL),
    "no permutation of keys": ("granite", unlike("attn_k.weight", halved), MODEL),
    "a permutation": ("qwen2", unlike("attn_q.weight", halved), MODEL),
    "norm without offset": ("gemma3_text", unlike("attn_norm.weight", lambda weight: weight - 1), MODEL),
    "tied head left out": ("qwen2", without("output.weight"), MODEL),
    "factors left out": ("llama", without("rope_freqs.weight"), MODEL),
    "base of positions": ("olmo2", keyed("olmo2.rope.freq_base", 1e6), MODEL),
    "scale of positions": ("qwen3", keyed("qwen3.rope.scaling.factor", 8.0), MODEL),
    "window left out": ("gemma2", keyed("gemma2.attention.sliding_window", 4096), MODEL),
    "soft cap": ("gemma2", keyed("gemma2.final_logit_softcapping", 30.0), MODEL),
    "scale of logits": ("granite", keyed("granite.logit_scale", 1.0), MODEL),
    "epsilon": ("olmo2", keyed("olmo2.attention.layer_norm_rms_epsilon", 0.1), MODEL),
    "transposed expert": ("gpt_oss", unlike("down_exps.weight", lambda weight: weight.transpose(1, 2)), MODEL),
    "experts in another order": ("qwen3_moe", unlike("gate_exps.weight", lambda weight: weight.flip(0)), MODEL),
    "sinks": ("gpt_oss", unlike("attn_sinks.weight", lambda weight: weight - 100), MODEL),
    "wrong pre-tokenizer": ("qwen2", keyed("tokenizer.ggml.pre", "smollm"), IDS),
    "merges cut short": ("qwen2", cut_merges, IDS),
    "lost added token": ("llama", lost, IDS),
    "framed": ("llama", keyed("tokenizer.ggml.add_bos_token", True), IDS),
    "no end of turn": ("llama", keyed("tokenizer.ggml.eos_token_id", 0), END),
    "another template": ("llama", keyed("tokenizer.chat_template", "{{ messages[0].content }}"), CHAT),
    "another key": ("lfm2", keyed("lfm2.shortconv.l_cache", 4), "cannot load it"),
}  # fmt: skip


@pytest.mark.slow(*(name for name in FAULTS if name not in {"no permutation", "lost added token"}))
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_published_by_no_type(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, plant, message = FAULTS[name]
    write = file.write_gguf

    def faulty(path: Path, name: str, keys: Keys, tensors: Mapping[str, TensorSource], *kind: Any) -> list[Path]:
        keys = {key: list(value) if isinstance(value, list) else value for key, value in keys.items()}
        tensors = dict(tensors)
        plant(keys, tensors)
        return write(path, name, keys, tensors, *kind)

    monkeypatch.setattr(file, "write_gguf", faulty)
    model = write_model(tmp_path / "model", family)
    if name == "no end of turn":  # which llama.cpp would know by its name
        _rename(model, "<|im_end|>", "<|done|>")
    with pytest.raises(VerificationError, match=message) as caught:
        written(model, "q8_0", tmp_path / "m.gguf")
    assert caught.value.exit_code == 6 and [path.name for path in tmp_path.iterdir()] == ["model"]
    if message == MODEL:
        moved = re.search(r"differ by (\S+) nats \(allowed (\S+)\)", caught.value.message)
        assert moved is not None and float(moved[1]) >= 100 * float(moved[2])


@pytest.mark.slow("bare")
@pytest.mark.parametrize("template", ["with its own", "bare"])
def test_a_chat_begins_in_llama_cpp_as_it_was_trained(template: str, tmp_path: Path) -> None:
    """The tokenizer puts a token before a text: llama.cpp does so before a chat, too, where its template has it."""
    model = write_model(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(model)
    one = [("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=one)
    tokenizer.bos_token = "<s>"
    if template == "with its own":
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    tokenizer.save_pretrained(model)
    report = written(model, "f32", tmp_path / "m.gguf")
    assert keys_of(report.path)["tokenizer.ggml.add_bos_token"] == (template != "bare")
    with engine.served(report.path, 64) as served:
        rendered = served.rendered([{"role": "user", "content": "a"}])
        wanted = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)
        assert served.ids(rendered, framed=True) == wanted["input_ids"]
        assert served.frame == ([] if template == "bare" else [one[0][1]])


def _rename(directory: Path, token: str, other: str) -> None:
    for path in [*directory.glob("*.json"), *directory.glob("*.jinja")]:
        path.write_text(path.read_text().replace(token, other))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an architecture": ({"model_type": "gpt2"}, "gpt2: no GGUF of this architecture is proven"),
    "an activation": ({"hidden_act": "relu"}, "llama with hidden_act: relu"),
    "positions": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_does_not_compute_is_refused(name: str, tmp_path: Path) -> None:
    facts, message = REFUSED[name]
    model = write_model(tmp_path / "model", "llama")
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | facts))
    with pytest.raises(RecipeError, match=message):
        written(model, "f32", tmp_path / "m.gguf", verify=False)


def test_a_tokenizer_without_merges_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    place = model / "tokenizer.json"
    facts = json.loads(place.read_text())
    facts["model"]["merges"] = []
    place.write_text(json.dumps(facts))
    with pytest.raises(RecipeError, match="without merges"):
        written(model, "f32", tmp_path / "m.gguf", verify=False)


@pytest.mark.parametrize(
    ("facts", "message"), [({"head": "score"}, "a reward model"), ({"quantize": "int8"}, "its base")]
)
def test_a_run_of_another_kind_is_refused(facts: Any, message: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "llama")
    run = runs.write_run(tmp_path / "run", base, LoraSpec(4, 8.0, 0.0, "all-linear"), **facts)
    with pytest.raises(RecipeError, match=message):
        source.source_of(run, print, "newest", TRAINED)


def test_a_tokenizer_that_cuts_otherwise_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    facts = json.loads((tmp_path / "tokenizer.json").read_text())
    assert vocabulary.pre_tokenizer(facts, export.fixed()[0]) == "gpt-2"
    facts["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    with pytest.raises(RecipeError, match="cuts text as this tokenizer does"):
        vocabulary.pre_tokenizer(facts, export.fixed()[0])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="the tokenizer has 503 tokens, the model 100 embeddings"):
        vocabulary.vocabulary(tokenizer, 100, [2], [])
    assert len(vocabulary.vocabulary(tokenizer, VOCAB, [2, 0], ["a"])["tokenizer.ggml.tokens"]) == VOCAB
    with pytest.raises(RecipeError, match="ends at 4 tokens"):
        vocabulary.vocabulary(tokenizer, VOCAB, [1, 2, 3, 4], ["a"])


OF_GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.slow
def test_a_cut_like_gpt_oss_has_a_name_that_knows_combining_marks(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    tokenizer: Any = Tokenizer.from_file(str(model / "tokenizer.json"))
    splits = Split(Regex(OF_GPT_OSS), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([*splits])
    trainer = BpeTrainer(vocab_size=VOCAB - 10, initial_alphabet=ByteLevel.alphabet(), special_tokens=list(SPECIAL))
    tokenizer.train_from_iterator(["हिन्दी में पाठ, ภาษาไทย x2024 SHOUT: DON'T"] * 9, trainer)  # tokens with marks
    tokenizer.save(str(model / "tokenizer.json"))
    report = written(model, "f32", tmp_path / "m.gguf")
    assert keys_of(report.path)["tokenizer.ggml.pre"] == "granite-embed-multi-97m"
    assert report.encoded_otherwise[0].startswith("words such as ")


def test_the_name_tells_llama_cpp_which_tokens_take_spaces(tmp_path: Path) -> None:
    for family, names in {"llama": ("mine", "my-phi_3"), "phi3": ("mine (phi-3)", "my-Phi3")}.items():
        write_tokenizer(tmp_path / family, family)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / family)
        assert tuple(vocabulary.named_for(name, tokenizer) for name in ("mine", "my-Phi3")) == names
        said = vocabulary.encoded_otherwise(tokenizer, {})
        assert [" after <call> " in each for each in said] == [True] * (family == "phi3")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    by_cut = {"tokenizer.ggml.pre": "granite-embed-multi-97m"}
    tokenizer.chat_template = "{{ messages[0]['content'].strip() }}"
    first, second, _, last = vocabulary.encoded_otherwise(tokenizer, by_cut)
    assert first.startswith("words such as ") and second.startswith("characters in several parts")
    assert last.startswith("messages that begin or end with a no-break or wide space")


@pytest.mark.parametrize(
    ("text", "content", "asked"),
    [
        ("e\u0301", "", False), ("\u00e9", "", True), ("<call>  \u3000x", "", False), ("<call>  x\u3000", "", True),
        ("", "\u3000x", False), ("", "x\x1c ", False), ("", " x\u3000y\n", True),
    ],
)  # fmt: skip
def test_llama_cpp_is_asked_what_it_can_answer(tmp_path: Path, text: str, content: str, asked: bool) -> None:
    write_tokenizer(tmp_path, "phi3")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    messages = [{"role": "user", "content": content}]
    assert vocabulary.is_alike(tokenizer, text, messages) is asked
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert vocabulary.is_alike(tokenizer, text, messages) is (asked or bool(content))


def test_what_has_no_file_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", "llama")
    with pytest.raises(RecipeError, match="model: is no run, and has no other steps"):
        source.source_of(model, print, 3, TRAINED)
    with pytest.raises(RecipeError, match="out: no name of a GGUF file"):
        written(model, "f32", tmp_path / "out")
    for name, message in (("model.safetensors", "model: holds no "), ("tokenizer.json", "model: .*: it has no ")):
        gone = (model / name).rename(tmp_path / name)
        with pytest.raises(DataError, match=message + name):
            written(model, "f32", tmp_path / "m.gguf", verify=False)
        gone.rename(model / name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xllamacpp" else name)
    with pytest.raises(MachineError, match="the library xllamacpp is missing") as caught:
        written(model, "f32", tmp_path / "m.gguf")
    assert caught.value.hint == "install it: pip install gguf xllamacpp"
    report = written(model, "f16", tmp_path / "m.gguf", verify=False)  # which does not need it
    assert keys_of(report.path)["tuner.verified"] == "not verified" and report.figures is None
    assert report.proof() == "not verified: --no-verify"


def test_llama_cpp_that_dies_or_takes_too_long_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", "llama")
    for limit, message in (("LOAD_S", "llama.cpp cannot load it: .*"), ("ANSWER_S", "llama.cpp said nothing for 0 s")):
        with monkeypatch.context() as patched, pytest.raises(VerificationError, match=f"^{message}; nothing was"):
            patched.setattr(engine, limit, 0.001)
            written(model, "f32", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_fails_while_it_is_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", "llama")

    def fails(*_: Any) -> TensorSource:
        raise DataError("damaged")

    monkeypatch.setattr(file, "_blocks", fails)
    with pytest.raises(TunerError, match="damaged"):
        written(model, "f32", tmp_path / "m.gguf", verify=False)
    monkeypatch.setattr(tensors.files, "free_bytes", lambda path: 1000)
    with pytest.raises(MachineError, match=f"{tmp_path}: the export needs .* bytes, 1,000 are free"):
        written(model, "f32", tmp_path / "m.gguf", verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_stays_wider_in_a_file_of_blocks() -> None:
    wanted = {
        ("token_embd.weight", (512, 64)): "q8_0",
        ("blk.0.attn_q.weight", (64, 64)): "q4_0",
        ("blk.0.attn_q.bias", (4, 64)): "f32",
        ("blk.0.ffn_down.weight", (64, 72)): "f16",
        ("blk.0.attn_norm.weight", (64,)): "f32",
        ("blk.0.ffn_gate_inp.weight", (8, 64)): "f32",
    }
    assert {key: file.type_of(*key, "q4_0") for key in wanted} == wanted


def test_steps_are_matched_to_tokens_where_that_is_certain() -> None:
    """llama.cpp leaves out the steps of tokens that end inside a character."""
    steps = [[5, "a"], [7, "b"], [5, "c"]]
    assert list(export._aligned([5, 7, 5], steps)) == [(2, "c"), (1, "b"), (0, "a")]
    assert list(export._aligned([9, 5, 7, 9, 5], steps)) == [(4, "c"), (2, "b"), (1, "a")]
    assert list(export._aligned([5, 5, 7], steps[:2])) == [(2, "b")]  # either 5 may be the first


SELECTED = '{% for m in messages | selectattr("tools", "undefined") %}{{ m.content }}{% endfor %}'
REFUSING = '{% if messages[0].role == "system" %}{{ raise_exception("none") }}{% endif %}' + TEMPLATE


@pytest.mark.parametrize("template", [REFUSING, SELECTED])
def test_a_template_that_refuses_is_not_asked_and_one_that_llama_cpp_lacks_is_named(
    template: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", "llama")
    (model / "chat_template.jinja").write_text(template)
    if template == REFUSING:
        exact = written(model, "f32", tmp_path / "m.gguf").exact
        assert exact is not None and exact.chats == 2
    else:
        with pytest.raises(VerificationError, match="selectattr: unknown test 'tools'"):
            written(model, "f32", tmp_path / "m.gguf")
