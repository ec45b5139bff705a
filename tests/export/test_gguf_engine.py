"""A GGUF file as llama.cpp serves it: asked for likelihoods, answers and a talk, as a model in transformers is."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.export.gguf_models import VOCAB, keys_of, write_model, written
from tests.fixtures.commands import tuner
from tuner.errors import DataError, MachineError, RecipeError
from tuner.evals.task import Asker, ScoreRequest
from tuner.generate import Answer, Prompt, Sampling

for needed in ("gguf", "xllamacpp"):
    pytest.importorskip(needed, reason=f"needs {needed}: pip install gguf xllamacpp")

from tuner.cli.work.served import ServedGenerator  # noqa: E402
from tuner.export.gguf import engine  # noqa: E402
from tuner.run.score_gguf import ServedScorer, ServedTexts  # noqa: E402

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
