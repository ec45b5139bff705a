"""GGUF files of K-quants, in shards, of an adapter by itself, with a Modelfile, and on their way to a hub.

A file as llama.cpp serves it is asked for likelihoods, answers and a talk, as a model in transformers is.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf  # noqa: E402
import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.export import runs
from tests.export.gguf_models import FAMILIES, TEMPLATE, VOCAB, keys_of, write_model, write_tokenizer, written
from tests.export.runs import LORA
from tests.fixtures.commands import tuner
from tests.fixtures.go_template import rendered
from tuner.cli.work.served import ServedGenerator  # noqa: E402
from tuner.data.encoding.template import ChatTemplate
from tuner.data.encoding.tokenizer_files import template_source
from tuner.errors import DataError, MachineError, RecipeError, VerificationError
from tuner.evals.task import Asker, ScoreRequest
from tuner.export.gguf import engine, export, file, lora, modelfile  # noqa: E402
from tuner.export.gguf.tables import table  # noqa: E402
from tuner.export.hub import find_export, plan_push
from tuner.export.tensors import held_tensor
from tuner.generate import Answer, Prompt, Sampling
from tuner.model.adapter import LoraSpec
from tuner.run.score_gguf import ServedScorer, ServedTexts  # noqa: E402

for needed in ("gguf", "xllamacpp"):
    pytest.importorskip(needed, reason=f"needs {needed}: pip install gguf xllamacpp")


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Rows that fill blocks of 256."""


@pytest.fixture(autouse=True)
def _few_texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(export, "N_TEXTS", 20)
    monkeypatch.setattr(runs, "write_tokenizer", write_tokenizer)
    export.fixed.cache_clear()
    yield
    export.fixed.cache_clear()


def test_which_tensor_has_which_type_is_llama_quantizes_choice() -> None:
    cases = YAML(typ="safe").load(Path(__file__).with_name("gguf_mixes.yaml"))
    codes = {"iq4_nl": "n", "iq4_xs": "x"} | {f"q{bits}_k": str(bits) for bits in range(2, 7)}
    assert {kind for case in cases for kind in case["types"]} == set(table("mixes"))
    for case in cases:
        for kind, wanted in case["types"].items():
            found = file.mixed(*_model(case["layers"], case["gqa"], case["head"]), kind)
            for part, types in wanted.items():
                names = [f"blk.{at}.{part}.weight" for at in range(len(types))]
                names = names if len(types) > 1 else [f"{part}.weight"]
                assert "".join(codes[found[name]] for name in names) == types, (kind, part)


def _model(layers: int, gqa: int, head: bool, width: int = 256, experts: int = 0) -> tuple[Any, Any]:
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
    names = [f"blk.{at}.{part}.weight" for at in range(layers) for part in parts]
    keys = {"block_count": layers, "attention.head_count": 8, "attention.head_count_kv": 8 // gqa}
    shapes = dict.fromkeys([*names, "token_embd.weight", *(["output.weight"] if head else [])], (width, width))
    return shapes, {f"llama.{key}": value for key, value in keys.items()} | {"llama.expert_count": experts}


@pytest.mark.parametrize(
    ("kind", "more", "wanted"),
    [
        ("q4_k_m", {"width": 96}, {"attn_q": "q5_0", "attn_v": "q8_0", "token_embd": "q8_0"}),  # rows of 32
        ("q5_k_m", {"width": 96}, {"attn_q": "q5_1", "attn_v": "q8_0"}),
        ("q2_k", {"width": 96}, {"attn_q": "q4_0", "attn_v": "q4_0"}),
        ("iq4_xs", {"width": 96}, {"attn_q": "iq4_nl"}),
        ("q4_k_m", {"width": 80}, {"attn_q": "f16"}),
        ("q4_k_m", {"experts": 8}, {"attn_v": "q8_0", "attn_k": "q8_0", "attn_output": "q5_k", "ffn_down": "q6_k"}),
        ("q6_k", {"experts": 8}, {"attn_v": "q8_0", "attn_output": "q6_k"}),
        ("q3_k_s", {"layers": 80}, {"attn_v": "q5_k", "attn_k": "q3_k"}),
    ],
)
def test_which_type_narrow_rows_few_experts_and_deep_models_have(kind: str, more: Any, wanted: dict[str, str]) -> None:
    """As its source has it, for what it was not asked of."""
    found = file.mixed(*_model(**{"layers": 8, "gqa": 2, "head": False, **more}), kind)
    for part, type_ in wanted.items():
        assert found["token_embd.weight" if part == "token_embd" else f"blk.0.{part}.weight"] == type_, part


@pytest.mark.parametrize("kind", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"])
def test_blocks_hold_what_was_given(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back by another reader; several threads write the same bytes as one."""
    block = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(0))
    data = bytes(file.quantized(block, kind))
    number = gguf.GGMLQuantizationType[kind.upper()]
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(15, -1).numpy()
    back = torch.from_numpy(gguf.quants.dequantize(rows, number)).reshape(block.shape)
    bits = 8 * len(data) / block.numel()
    assert (back - block).square().mean().sqrt() < 1.6 * 2.0**-bits * 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert bytes(file.quantized(block, kind)) == data


def test_without_the_code_that_writes_k_quants_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file.quantizer.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=None))
    with pytest.raises(MachineError, match="K-quants are written by llama.cpp's own code") as caught:
        file.quantizer()
    assert caught.value.exit_code == 4 and "pip install" in str(caught.value.hint)
    file.quantizer.cache_clear()


@pytest.mark.slow
def test_q4_k_m_is_published_with_what_it_costs(tmp_path: Path) -> None:
    report = written(write_model(tmp_path / "model", "llama", **WIDE), "q4_k_m", tmp_path / "m.gguf")
    assert report.figures is not None and 1e-3 < report.figures.kl < 0.2 and report.better() == "q5_0"
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(report.path).tensors}
    assert types["blk.0.attn_q.weight"] == "Q4_K" and types["output.weight"] == "Q6_K"


def test_shards_are_within_their_size_and_one_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", "llama")
    limit = 100_000
    report = written(model, "f32", tmp_path / "m.gguf", shard_bytes=limit)
    paths = sorted((tmp_path / "m").iterdir())
    assert [path.name for path in paths] == [f"m-{at:05d}-of-{len(paths):05d}.gguf" for at in range(1, len(paths) + 1)]
    assert report.path == paths[0] and report.files == len(paths) > 3 and report.exact is not None
    sizes = {path.name: path.stat().st_size for path in paths}
    readers = [gguf.GGUFReader(path) for path in paths]
    assert all(sizes[path.name] <= limit or len(one.tensors) == 1 for path, one in zip(paths, readers, strict=True))
    assert sum(len(one.tensors) for one in readers) == readers[0].fields["split.tensors.count"].contents()
    assert not (tmp_path / "m.gguf").exists() and report.bytes == sum(sizes.values())
    with pytest.raises(RecipeError, match="/m: exists already"):
        written(model, "f32", tmp_path / "m.gguf", shard_bytes=limit)
    whole = written(model, "f32", tmp_path / "n.gguf", verify=False, shard_bytes=1 << 30)
    assert whole.path == tmp_path / "n.gguf" and whole.files == 1


@pytest.mark.slow(*(family for family in FAMILIES if family not in {"llama", "lfm2"}))
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "lfm2"])
def test_an_adapter_by_itself_is_the_trained_model_on_its_base(family: str, tmp_path: Path) -> None:
    run = runs.write_run(tmp_path / "run", write_model(tmp_path / "base", family), LORA, amount=0.2)
    report = written(run, "f32", tmp_path / "base.gguf", keep=True)  # whatever its base is called meanwhile
    assert report.exact is not None and report.exact.difference <= (5e-3 if family.startswith("gemma") else 1e-4)
    reader, keys = gguf.GGUFReader(report.path), keys_of(report.path)
    assert keys["general.type"] == "adapter" and keys["adapter.lora.alpha"] == 8.0 and keys["tuner.step"] == "7"
    assert {tensor.name.rpartition(".")[2] for tensor in reader.tensors} == {"lora_a", "lora_b"}


@pytest.mark.slow
def test_a_planted_fault_of_an_adapter_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.write_run(tmp_path / "run", write_model(tmp_path / "base", "llama"), LORA, amount=0.2)
    write = file.write_gguf

    def swapped(path: Path, name: str, keys: Any, tensors: Mapping[str, Any], *kind: Any) -> list[Path]:
        for each in [each for each in tensors if each.endswith("attn_q.weight.lora_b")]:
            tensors = {**tensors, each: held_tensor(tensors[each].whole().flip(0))}
        return write(path, name, keys, tensors, *kind)

    monkeypatch.setattr(file, "write_gguf", swapped)
    with pytest.raises(VerificationError, match="another model"):
        written(run, "bf16", tmp_path / "a.gguf", keep=True)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "run"}


@pytest.mark.slow
def test_an_adapter_of_peft_with_ranks_of_its_own(tmp_path: Path) -> None:
    """One alpha stands in the file: B has what its rank and alpha differ by."""
    from peft import LoraConfig, get_peft_model

    from tuner.export.verify import load_plain

    base = write_model(tmp_path / "base", "qwen2")
    torch.manual_seed(0)
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}}
    modules = ["q_proj", "k_proj", "down_proj"]
    model: Any = get_peft_model(
        load_plain(base, "tokens"), LoraConfig(r=4, lora_alpha=8, target_modules=modules, **patterns)
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    report = written(tmp_path / "adapter", "f32", tmp_path / "a.gguf", keep=True)
    assert report.exact is not None and report.exact.difference <= 1e-4
    with pytest.raises(RecipeError, match="an adapter alone, without its model"):
        written(tmp_path / "adapter", "f32", tmp_path / "b.gguf")
    facts = tmp_path / "adapter" / "adapter_config.json"
    facts.write_text(facts.read_text().replace(str(base), "me/base"))
    with pytest.raises(RecipeError, match=re.escape("base_model_name_or_path: me/base: no model's directory")):
        written(tmp_path / "adapter", "f32", tmp_path / "b.gguf", keep=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "DoRA's lengths"),
    "saved": ({"modules_to_save": ["lm_head"]}, re.escape("modules_to_save: ['lm_head']")),
    "bias": ({"bias": "all"}, "trained biases"),
    "experts": ({"experts": True}, "routed experts"),
    "kind": ({"peft_type": "LOHA"}, "of kind loha"),
    "a run's": ({"kind": "dora", "use_dora": True}, "of kind dora, DoRA's lengths"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gguf_adapter_cannot_hold_is_named(name: str) -> None:
    facts, message = REFUSED[name]
    with pytest.raises(RecipeError, match=f"cannot hold .*{message}"):
        lora.refuse("x", facts)
    lora.refuse("x", {"peft_type": "LORA", "bias": "none", "modules_to_save": None, "use_dora": False})


def test_what_does_not_go_with_an_adapter_is_refused(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "llama")
    run = runs.write_run(tmp_path / "run", base, LORA)
    for kind, options, message in (
        ("q8_0", {}, "ranks do not fill blocks"),
        ("bf16", {"shard_bytes": 5}, "an adapter is one file"),
        ("bf16", {"with_modelfile": True}, "next to one file of a whole model"),
    ):
        with pytest.raises(RecipeError, match=message):
            written(run, kind, tmp_path / "a.gguf", keep=True, **options)
    with pytest.raises(RecipeError, match="a whole model, which has no adapter"):
        written(base, "bf16", tmp_path / "a.gguf", keep=True)
    full = runs.write_run(tmp_path / "full", base)
    with pytest.raises(RecipeError, match="the run trained all parameters"):
        written(full, "bf16", tmp_path / "a.gguf", keep=True)
    tied = write_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    of_head = runs.write_run(tmp_path / "head", tied, LoraSpec(4, 8.0, 0.0, ("q_proj", "lm_head")))
    for keep, message in ((True, "lm_head.weight is adapted: a GGUF adapter has no place"), (False, "tied to")):
        with pytest.raises(RecipeError, match=message) as caught:
            written(of_head, "bf16", tmp_path / "a.gguf", keep, verify=False)
        assert "tuner export-hf RUN --adapter keep" in str(caught.value.hint)


CHATS = [
    [{"role": "user", "content": "What is it?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "So\n2"}],
]


@pytest.mark.parametrize("name", table("ollama"))
def test_a_template_in_go_renders_as_the_trained_one(name: str) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(template_source(name), tokens)
    found = table("ollama")[name].replace("BOS", "<s>").replace("EOS", "</s>")
    for chat in CHATS:
        assert rendered(found, chat) == template.render(chat, add_generation_prompt=True)


def test_a_modelfile_has_the_template_only_where_it_is_ours(tmp_path: Path) -> None:
    tokenizer: Any = SimpleNamespace(
        bos_token="<s>", eos_token="</s>", convert_ids_to_tokens=lambda ids: [f"<{at}>" for at in ids]
    )
    words = {"tokenizer.chat_template": template_source("tulu"), "tokenizer.ggml.add_bos_token": False}
    known = modelfile.modelfile("m.gguf", tokenizer, words, [7])
    assert known.text.startswith('FROM ./m.gguf\nTEMPLATE """<s>{{ range') and known.template == "tulu"
    assert known.text.endswith('"""\nPARAMETER stop "<7>"\n') and "BOS" not in known.text and "EOS" not in known.text
    adds = modelfile.modelfile("m.gguf", tokenizer, {**words, "tokenizer.ggml.add_bos_token": True}, [])
    assert 'TEMPLATE """{{ range' in adds.text
    other = modelfile.modelfile("m.gguf", tokenizer, {"tokenizer.chat_template": TEMPLATE}, [7])
    assert other.text == 'FROM ./m.gguf\nPARAMETER stop "<7>"\n' and "no Go template" in other.in_words()


def test_a_file_is_pushed_with_its_modelfile_where_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", "llama")
    report = written(model, "q8_0", tmp_path / "m.gguf", verify=False, with_modelfile=True)
    with pytest.raises(RecipeError, match=re.escape("m.gguf: it was not verified")):
        plan_push(find_export(report.path), "me/m")
    monkeypatch.setattr(export, "_metadata", lambda *_: {"tuner.verified": "x", "tuner.step": "7"})
    report = written(model, "q8_0", tmp_path / "n.gguf", verify=False, with_modelfile=True)
    plan = plan_push(find_export(report.path), "me/m")
    assert plan.files == {"n.gguf": report.path, "Modelfile": tmp_path / "n.Modelfile"} and plan.step == 7
    with pytest.raises(RecipeError, match="n.Modelfile: exists already"):
        report.path.rename(tmp_path / "elsewhere.gguf")
        written(model, "q8_0", tmp_path / "n.gguf", verify=False, with_modelfile=True)
    shards = written(model, "q8_0", tmp_path / "s.gguf", verify=False, shard_bytes=80_000)
    assert sorted(plan_push(shards.path, "me/m").files) == sorted(path.name for path in shards.path.parent.iterdir())
    last = sorted(shards.path.parent.iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-40])
    with pytest.raises(DataError, match="no whole GGUF file|ends early"):
        plan_push(shards.path, "me/m")
    last.unlink()
    with pytest.raises(DataError, match=re.escape(last.name)):
        plan_push(shards.path, "me/m")


@pytest.mark.slow
@pytest.mark.parametrize("form", [("--type", "q4_k_m"), ("--type", "q8_0", "--shard-size", "700KB")])
def test_killed_at_any_moment_nothing_looks_whole_that_is_not(form: tuple[str, ...], tmp_path: Path) -> None:
    """What is there after a kill is nothing, or the whole of it; the next export publishes and leaves nothing else."""
    write_model(tmp_path / "model", "llama", **WIDE)
    command = [sys.executable, "-m", "tuner", "export-gguf", "model", *form, "--output"]
    null, begun = subprocess.DEVNULL, time.monotonic()
    subprocess.run([*command, "whole/m.gguf"], cwd=tmp_path, capture_output=True, check=True)
    seconds = time.monotonic() - begun

    def shown(directory: Path) -> dict[str, bytes]:
        return {name: data for name, data in runs.contents(directory).items() if not name.startswith(".")}

    whole, out = shown(tmp_path / "whole"), tmp_path / "out"
    assert whole
    for part in range(6):
        started = subprocess.Popen([*command, "out/m.gguf"], cwd=tmp_path, stdout=null, stderr=null)
        time.sleep(seconds * (part + 0.5) / 6)
        started.send_signal(signal.SIGKILL)
        started.wait()
        if found := shown(out):
            assert found == whole
            shutil.rmtree(out)
    done = subprocess.run([*command, "out/m.gguf"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shown(out) == whole
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []


CHAT = ({"role": "user", "content": " Is it 中文🙂 raining?"},)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory, with its file at f32 beside it."""
    place = tmp_path_factory.mktemp("served")
    directory = write_model(place / "model", "llama")
    written(directory, "f32", place / "m.gguf", verify=False)
    return directory


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[engine.Engine]:
    with engine.served(model.with_name("m.gguf"), 4096) as found:
        yield found


def log_probabilities(model: Path, ids: Any) -> torch.Tensor:
    """float32 ``[T, V]`` of transformers: of what follows each token."""
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        logs: torch.Tensor = plain(torch.tensor([[*ids]])).logits[0].log_softmax(-1)
    return logs


def test_likelihoods_are_those_of_transformers(model: Path, served: engine.Engine) -> None:
    """Of tokens inside a character too, of which llama.cpp gives none."""
    asker = Asker(ServedTexts(served), 64)
    greedy = int(log_probabilities(model, served.ids("a b"))[-1].argmax())
    requests = [asker.pair("a b", " cat 中"), asker.answer("a", "🙂")]
    requests.append(ScoreRequest(tuple(served.ids("a b")), (greedy,)))
    found = ServedScorer(served).likelihoods(requests)
    for request, one in zip(requests, found, strict=True):
        ids, count = [*request.context, *request.continuation], len(request.continuation)
        each = log_probabilities(model, ids)[-count - 1 : -1].gather(1, torch.tensor(request.continuation)[:, None])
        assert one.log_likelihood == pytest.approx(float(each.sum()), abs=5e-3 * count)  # its cache is float16
    assert [one.is_greedy for one in found] == [False, False, True]


def test_texts_and_chats_are_those_of_the_trained_tokenizer(model: Path, served: engine.Engine) -> None:
    texts, tokenizer = ServedTexts(served), AutoTokenizer.from_pretrained(model)
    text = "Straße 中文 🙂 <|im_end|> def f(x):\n  <call>"
    assert texts.encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert texts.render(CHAT, True) == tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert texts.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert texts.has_template and texts.text_prefix == [] and texts.eos_ids == (2,)


def test_answers_are_the_greedy_ones(model: Path, served: engine.Engine) -> None:
    ids = served.ids("What is it?")
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    made = plain.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = tokenizer.decode(made, skip_special_tokens=True)
    whole, cut = ServedScorer(served).answers([ids, ids], [12, 12], [[], [wanted[3]]])
    assert whole.rstrip("�") == wanted.rstrip("�") and cut == wanted[: wanted.index(wanted[3])]


def test_a_talk_is_held_with_the_file(served: engine.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    talker, shown = ServedGenerator(served, served.has_template), list[str]()
    assert talker.has_template
    answer = talker.generate(Prompt("", CHAT), Sampling(8), shown.append)
    assert answer.cut and answer.tokens == 8 and "".join(shown) == answer.text
    drawn = [talker.generate(Prompt("", CHAT), Sampling(8, 1.0, seed)).text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(RecipeError, match=r"the prompt has 8,\d+ tokens, the model takes 512"):
        talker.generate(Prompt("", ({"role": "user", "content": "🙂" * 2048},)), Sampling(8))

    def stop(text: str) -> None:
        raise KeyboardInterrupt

    assert talker.generate(Prompt("", CHAT), Sampling(64), stop) == Answer(answer.text[: len(shown[0])], 0, cut=True)
    assert not replace(served, keys={}).has_template


def test_a_server_that_is_gone_is_said(model: Path) -> None:
    with engine.served(model.with_name("m.gguf"), 64) as found:
        servers = [int(p.name) for p in Path("/proc").glob("[0-9]*") if found.path.name.encode() in _opened(p)]
        os.kill(max(servers), signal.SIGKILL)  # the other one may be that of the fixture
        with pytest.raises(MachineError, match="llama.cpp ended"):
            found.ids("a")


@pytest.mark.slow
def test_a_server_whose_parent_dies_while_it_loads_ends(model: Path) -> None:
    job = {"model": str(model.with_name("m.gguf")), "context": 64, "threads": 1, "key": "k", "exact": True}
    for _ in range(8):  # llama.cpp's own end waited forever in one of four
        words, pipe = [sys.executable, "-m", "tuner.export.gguf.llama_server"], subprocess.PIPE
        server = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        server.communicate(json.dumps({**job, "adapter": None}).encode() + b"\n", timeout=60)


def _opened(process: Path) -> bytes:
    try:
        is_child = f"\nPPid:\t{os.getpid()}\n" in (process / "status").read_text()
        return (process / "maps").read_bytes() if is_child else b""
    except OSError:
        return b""


ADAPTER = (b"general.type", struct.pack("<I", 8)), (b"adapter", b"")
BROKEN = {
    "no file": (None, "No such file"),
    "another file": (b"PK\3\4" + bytes(40), "begins with b'PK"),
    "cut short": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 4), "ends early"),
    "endless": (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 60), "a text of 1,152,921,504,606,846,976 bytes"),
    "an adapter": (
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
        + b"".join(struct.pack("<Q", len(text)) + text + more for text, more in ADAPTER),
        "is an adapter by itself",
    ),
    "no model": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "llama.cpp cannot load it"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    if content is not None:
        (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(DataError, match=message), engine.served(tmp_path / "m.gguf", 64):
        pass


def test_a_header_is_read_as_the_library_reads_it(model: Path) -> None:
    path = model.with_name("m.gguf")
    fields = {name: value for name, value in keys_of(path).items() if "GGUF." not in name}
    assert engine.read_keys(path) == {k: len(v) if isinstance(v, list) else v for k, v in fields.items()}
    assert engine.read_keys(path)["llama.vocab_size"] == VOCAB


def test_the_commands_take_a_file(model: Path, tmp_path: Path) -> None:
    path = str(model.with_name("m.gguf"))
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "a", "choices": ["b", "🙂"], "answer": 0}) + "\n")
    (tmp_path / "r.yaml").write_text("model: {name_or_path: x}\ndata: {train: y}\n")
    words = ("eval", path, "--engine", "llama.cpp", "--tasks", "t.jsonl", "--output", "out", "--data.max_length", "64")
    done = tuner(*words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "t/acc" in done.stdout and (tmp_path / "out" / "t.jsonl").is_file()
