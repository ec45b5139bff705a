"""Ids are those of the tokenizer that transformers makes of the files, whatever tokenizer.json says, and stay so."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data import spm, tiny
from tests.data.families import TEMPLATES
from tests.fixtures import forked, tables
from tuner.config.recipe import TokenizerSection
from tuner.data.building.report import report_lines, warnings_of
from tuner.data.encoding import tokenizer_files
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.encoding.tokenizer_files import load_tokenizer
from tuner.data.id_probes import adversarial_texts
from tuner.errors import DataError, MachineError, PluginError

CHATS = tables.cases(__file__, "chats")
LLAMA = {"tokenizer_class": "LlamaTokenizer", **spm.NAMES}


def files_of(kind: str) -> dict[str, bytes]:
    """Files as a model ships them: what is asked of transformers is another tokenizer for each."""
    if kind in {"bpe", "unigram"}:
        return {"tokenizer.model": spm.model(kind)}
    if kind != "digits":
        return {"tokenizer.json": spm.tokenizer_json(normalizes=kind == "normalizes")}
    spec = json.loads(tiny.tokenizer_json())
    digits = {"type": "Digits", "individual_digits": True}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, spec["pre_tokenizer"]]}
    return {"tokenizer.json": json.dumps(spec).encode()}


@pytest.mark.parametrize(("kind", "template", "model_type", "config"), tables.cases(__file__, "as_models_ship_them"))
def test_ids_are_those_of_the_exports_readers(
    tmp_path: Path, kind: str, template: str, model_type: str | None, config: dict[str, Any]
) -> None:
    """Of an export: the files that a run keeps, next to the model's config.json; and of those files alone."""
    from transformers import AutoTokenizer

    base = spm.write(tmp_path / "base", files_of(kind), model_type, **config)
    (base / "chat_template.jinja").write_text(TEMPLATES[template])
    ours = load_tokenizer(str(base), None, TokenizerSection())
    ours.save(tmp_path / "run")
    export = spm.write(tmp_path / "export", dict(ours.files), model_type)
    for directory in (export, tmp_path / "run"):
        theirs = AutoTokenizer.from_pretrained(directory)
        for chat in CHATS:
            messages = [{"role": role, "content": content} for role, content in chat]
            assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False)
            assert ours.encode(ours.render(messages)) == theirs.apply_chat_template(messages, return_dict=False)
        for text in adversarial_texts(ours):
            assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
            assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"], text
        assert (ours.eos_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    if config.get("auto_map") is None:
        plain = AutoTokenizer.from_pretrained(base)
        assert plain(" a\n b </s> c")["input_ids"] == ours.encode(" a\n b </s> c", add_special_tokens=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """How often transformers is asked."""
    calls: list[object] = []

    def run(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return forked.run(*arguments, **options)

    monkeypatch.setattr(tokenizer_files, "subprocess", SimpleNamespace(run=run))
    return calls


def write_llama(place: Path) -> Path:
    return spm.write(place / "base", {"tokenizer.json": spm.tokenizer_json()}, "llama", **LLAMA)


def load(directory: Path, cache: Path) -> TextTokenizer:
    return load_tokenizer(str(directory), None, TokenizerSection(), cache)


@pytest.mark.parametrize("at", ["its files", "the answer"])
def test_a_full_disk_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    base = write_llama(tmp_path)
    cut = subprocess.CompletedProcess([], 2, "", "a warning\n28\n")  # what the process says that writes the answer
    monkeypatch.setattr(tokenizer_files, "subprocess", SimpleNamespace(run=lambda *_, **__: cut))
    if at == "its files":
        monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    with pytest.raises(MachineError, match=rf"{tmp_path}/c/tokenizers/\w+: No space left on device") as caught:
        load(base, tmp_path / "c")
    assert "data.cache_dir" in str(caught.value.hint)
    assert not [*(tmp_path / "c").rglob(".tmp-*")]


def test_the_process_that_answers_says_what_the_machine_refused(tmp_path: Path) -> None:
    code = "import os, sys, tuner.transformers_tokenizer as asked\ndef full(job): raise OSError(28, os.strerror(28))\n"
    code += "asked._answer = full\nsys.exit(asked.main())"
    done = forked.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "28\n")


def test_transformers_is_asked_once(tmp_path: Path, asked: list[object]) -> None:
    base, cache = write_llama(tmp_path), tmp_path / "c"
    first = load(base, cache)
    (base / "chat_template.jinja").write_text(spm.TURNS)
    (base / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    again = load(base, cache)
    assert len(asked) == 1
    assert first.hash == again.hash
    assert again.loaded_as is not None
    assert again.loaded_as["class"] == "LlamaTokenizer"
    assert again.loaded_as["changed"] == ["normalizer", "pre_tokenizer", "model"]
    (base / "config.json").write_text('{"model_type": "mistral"}')
    assert load(base, cache).hash != first.hash
    [answer] = {
        path.parent for path in cache.rglob("tokenizer.json") if first.files["tokenizer.json"] == path.read_bytes()
    }
    (answer / "tokenizer.json").write_bytes(b"{")
    (base / "config.json").write_text('{"model_type": "llama"}')
    assert load(base, cache).hash == first.hash
    assert len(asked) == 3


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path: Path, asked: list[object]) -> None:
    base = write_llama(tmp_path)
    (tmp_path / "file").write_text("")
    assert load(base, tmp_path / "file").hash == load(base, tmp_path / "cache").hash
    assert len(asked) == 2


def test_files_that_are_loaded_as_they_are_stay_as_they_are(tmp_path: Path) -> None:
    base = tiny.write_directory(tmp_path / "base")
    tokenizer = load(base, tmp_path / "cache")
    assert tokenizer.files == tiny.files()
    assert tokenizer.hash == tiny.tokenizer().hash
    assert tokenizer.loaded_as == {
        "transformers": version("transformers"), "class": "TokenizersBackend", "changed": [], "other_versions": []
    }


def test_another_version_with_other_ids_is_named(tmp_path: Path) -> None:
    base, cache = write_llama(tmp_path), tmp_path / "c"
    load(base, cache)
    [answer] = cache.rglob("answer.json")
    for other, digest in (("4.57.0", "0" * 64), ("5.22.0", json.loads(answer.read_text())["ids_sha256"])):
        directory = answer.parent.parent / f"{other}-{tokenizer_files.FORMAT}"
        directory.mkdir()
        (directory / "answer.json").write_text(json.dumps({"ids_sha256": digest}))
    loaded = load(base, cache).loaded_as
    assert loaded is not None
    assert loaded["other_versions"] == ["4.57.0"]
    report = {"tokenizer": loaded, "sources": {}, "overlap": 0, "train": None, "eval": None}
    [warning] = warnings_of(report, "rejects")
    assert f"transformers {version('transformers')} gives other ids than 4.57.0 did" in warning


def test_a_model_whose_type_decides_otherwise_is_refused(tmp_path: Path) -> None:
    """Of Qwen 2, transformers rebuilds any tokenizer as Qwen's: no export could have the ids of the other one."""
    own = spm.write(tmp_path / "own", {"tokenizer.json": spm.tokenizer_json()}, None, **LLAMA)
    model = spm.write(tmp_path / "model", {}, "qwen2")
    section = TokenizerSection(name_or_path=str(own))
    with pytest.raises(DataError, match=r"LlamaTokenizer, and with the config of the model \(qwen2\) next to it"):
        load_tokenizer(str(model), None, section, tmp_path / "cache")


@pytest.mark.parametrize(("files", "config", "reason"), tables.cases(__file__, "without_its_code_or_package"))
def test_a_tokenizer_without_its_code_or_package_is_refused(
    files: dict[str, str], config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Another class would cut the text by another pattern."""
    pytest.importorskip("transformers")
    if "tiktoken" in reason and find_spec("tiktoken") is not None:
        pytest.skip("tiktoken is here")
    written = {name: text.encode() for name, text in files.items()}
    base = spm.write(tmp_path / "base", written, "llama", tokenizer_class="T", **config)
    with pytest.raises(DataError, match=reason):
        load(base, tmp_path / "cache")


def test_a_tokenizer_that_the_models_class_takes_over_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """What is advised is tried."""
    pytest.importorskip("transformers")
    model, other = tmp_path / "model", tmp_path / "other"
    for directory, kind in ((model, "qwen2"), (other, "llama")):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    named = TokenizerSection(name_or_path="byte")
    with pytest.raises(DataError, match=r"with the config of the model \(qwen2\)") as refused:
        load_tokenizer(str(model), None, named, tmp_path / "cache")
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("name a tokenizer of the model's own family; with model.init: random")
    assert load_tokenizer(str(other), None, named, tmp_path / "cache").vocab_size
    for name, data in tiny.files(tokenizer_class="Qwen2Tokenizer").items():
        (model / name).write_bytes(data)
    with pytest.raises(DataError) as refused:
        load_tokenizer(str(model), None, named, tmp_path / "cache2")
    assert refused.value.hint == f"leave out tokenizer.name_or_path: {model} has a tokenizer of its own"
    assert load_tokenizer(str(model), None, TokenizerSection(), tmp_path / "cache").vocab_size
    of_family = TokenizerSection(name_or_path=str(model))
    assert load_tokenizer(str(tmp_path / "none"), None, of_family, tmp_path / "cache").vocab_size


OWN = """
from tokenizers import normalizers
def lower(tokenizer, end=None):
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.eos_token = end or tokenizer.eos_token
    return tokenizer
def nothing(tokenizer): pass
def fails(tokenizer): raise KeyError("vocabulary")
"""


@pytest.fixture
def made_by(tmp_path: Path) -> Callable[..., TextTokenizer]:
    """The tokenizer that code of the user's own makes of one whose class rebuilds its normaliser."""
    base = write_llama(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/tool_use.jinja").write_text(spm.INST)

    def load(name: str, **args: Any) -> TextTokenizer:
        section = TokenizerSection(use=f"{tmp_path}/own.py:{name}", args=args)
        return load_tokenizer(str(base), None, section, tmp_path / "cache")

    return load


def test_code_makes_the_tokenizer_that_readers_get(tmp_path: Path, made_by: Callable[..., TextTokenizer]) -> None:
    from transformers import AutoTokenizer

    plain = load(tmp_path / "base", tmp_path / "cache")
    ours = made_by("lower", end="<s>")
    assert (ours.encode("A B a b"), ours.eos_id) == (plain.encode("a b a b"), plain.encode("<s>")[-1])
    assert ours.hash != plain.hash and ours.encode("A B") != plain.encode("A B")
    export = spm.write(tmp_path / "export", {k: v for k, v in ours.files.items() if "/" not in k}, "llama")
    theirs = AutoTokenizer.from_pretrained(export)
    assert theirs("A B", add_special_tokens=False)["input_ids"] == ours.encode("A B")
    assert theirs.eos_token_id == ours.eos_id
    report = {"tokenizer": ours.loaded_as, "notes": {}, "fast_path": {"share": 0, "reason": None}, "escaped": 0}
    lines = report_lines({**report, "sources": {}, "train": None, "eval": None}, "pretrain", 8, True)
    assert lines == [("tokenizer", f"made by {tmp_path}/own.py:lower ({(ours.loaded_as or {})['class']})")]
    (tmp_path / "own.py").write_text(OWN.replace("Lowercase", "NFC"))
    assert made_by("lower").encode("A B") == plain.encode("A B")  # what it returned before is not kept


@pytest.mark.parametrize(("name", "args", "message"), tables.cases(__file__, "code_that_makes_no_tokenizer_is_named"))
def test_code_that_makes_no_tokenizer_is_named(
    made_by: Callable[..., TextTokenizer], name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        made_by(name, **args)
    assert (caught.value.hint is None) is (name in {"nothing", "fails"})
