"""Data sources: their bad rows, kinds, identities and slices; and what a look at them finds for a recipe."""

import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.data import tiny
from tests.data.reading.cases import cases
from tests.data.reading.files import one, values, write_kind, write_stream
from tests.fixtures import commands, forked, tables
from tuner.config.load import load_recipe
from tuner.config.recipe import DataSource
from tuner.config.starter import FEW_STEPS, Room, starter
from tuner.data import look as module
from tuner.data import sources
from tuner.data.building.documents import explain
from tuner.data.building.prepare import prepare
from tuner.data.building.spec import PrepareSpec
from tuner.data.look import Look, look
from tuner.data.reading.blocks import blocks, records_of
from tuner.data.reading.data_sets import hub_files
from tuner.data.sources import SourceFile, expand
from tuner.errors import DataError, MachineError

GOOD = json.dumps(tiny.chat("hi", "hello")).encode()
DEEP = '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize(
    ("raw", "col", "reason"),
    [*cases("bad_lines", "raw", "col", "reason", name="reason"), (DEEP, 1, "nested too deeply")],
)
def test_bad_rows_are_named_or_skipped(tmp_path: Path, raw: str, col: int, reason: str) -> None:
    line = raw.encode("latin-1")  # a byte is the character of its number in the file of cases
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n\n" + line + b"\r\n" + GOOD)
    with pytest.raises(DataError) as caught:
        prepare(tiny.request(tmp_path / "cache", path))
    assert caught.value.message.startswith(f"{path}:3:{col}: ")
    assert reason in caught.value.message
    assert caught.value.hint is not None
    info = prepare(tiny.request(tmp_path / "cache", path, on_bad_row="skip"))
    assert sum(info.report["train"]["skipped"].values()) == 1
    assert (info.report["train"]["rows"], info.report["train"]["documents"]) == (3, 2)
    (reject,) = [json.loads(entry) for entry in (info.path / "rejects.jsonl").read_text().splitlines()]
    assert (reject["file"], reject["line"], reject["col"]) == (str(path), 3, col)
    assert reason in reject["reason"]


def names(*sources: DataSource) -> list[str]:
    return [Path(file.name).name for file in expand(sources)]


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, reason in [("none.jsonl", "no such file"), ("*.jsonl", "no such file"), ("empty", "no file of a known")]:
        with pytest.raises(DataError, match=reason) as caught:
            one(tmp_path / path)
        assert caught.value.hint
    (tmp_path / "a.bin").write_text("x")
    (tmp_path / "a.parquet.gz").write_text("x")
    for name in ("a.bin", "a.parquet.gz"):
        with pytest.raises(DataError, match="unknown kind of file") as caught:
            one(tmp_path / name)
        assert ".jsonl" in str(caught.value.hint)
    assert one(tmp_path / "a.bin", format="text").kind == "text"
    assert one(tmp_path / "a.bin", format="messages").kind == "jsonl"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        one(tmp_path / "pipe")


def test_kinds_follow_from_names(tmp_path: Path) -> None:
    for name, kind, compression in tables.cases(__file__, "kinds_follow_from_names"):
        (tmp_path / name).write_bytes(b"x")
        file = one(tmp_path / name)
        assert (file.kind, file.compression, file.name) == (kind, compression, str(tmp_path / name))


def test_directories_and_globs_are_sorted_and_leave_out_what_is_hidden(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.txt", "sub/c.csv", "sub/.hidden.jsonl", ".git/d.jsonl", ".e.jsonl", "README", "a.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert names(DataSource(path=str(tmp_path))) == ["a.txt", "b.jsonl", "c.csv"]
    assert names(DataSource(path=f"{tmp_path}/*.*l")) == ["b.jsonl"]
    assert names(DataSource(path=f"{tmp_path}/**/*.[ct]*")) == ["a.txt", "c.csv"]
    (tmp_path / "[odd].jsonl").write_text("x")
    assert names(DataSource(path=f"{tmp_path}/[odd].jsonl")) == ["[odd].jsonl"]
    files = expand([DataSource(path=f"{tmp_path}/a.txt"), DataSource(path=str(tmp_path / "sub"), weight=2)])
    assert [(file.source, file.weight) for file in files] == [(0, 1.0), (1, 2.0)]


def test_a_digest_is_of_every_byte_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PIECE_BYTES", 10)
    monkeypatch.setattr(sources, "_COPY_BYTES", 4)
    content = bytes(range(35))
    path = tmp_path / "a.jsonl"
    digests = []
    changed = (content[:i] + b"x" + content[i + 1 :] for i in range(35))
    swapped = content[10:20] + content[:10] + content[20:]
    for other in (content, *changed, swapped, content + b"x", content[:-1], content[:30], content[:10], b""):
        path.write_bytes(other)
        digests.append(sources.content_digest(path))
        assert sources.content_digest(path) == digests[-1]
    assert len(set(digests)) == len(digests)
    pieces = [hashlib.sha256(content[i : i + 10]).digest() for i in range(0, 35, 10)]
    assert digests[0] == hashlib.sha256(b"".join(pieces)).digest()


def test_an_identity_is_of_bytes_and_of_how_they_are_read(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "a.ndjson", "a.txt", "a.json"):
        (tmp_path / name).write_bytes(b'{"text": "x"}\n')
    (tmp_path / "other.jsonl").write_bytes(b'{"text": "y"}\n')
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as zipped:
        zipped.write(b'{"text": "x"}\n')
    plain = one(tmp_path / "a.jsonl").identity()
    assert json.loads(json.dumps(plain)) == plain
    assert one(tmp_path / "b.jsonl").identity() == one(tmp_path / "a.ndjson").identity() == plain
    second = expand([DataSource(path=str(tmp_path / name)) for name in ("other.jsonl", "a.jsonl")])[1]
    assert second.identity() == plain
    read = ({"format": "text"}, {"columns": {"text": "x"}}, {"columns": {"text": "y"}}, {"weight": 2}, {"count": 5})
    others = [
        *(one(tmp_path / name) for name in ("other.jsonl", "a.txt", "a.json", "a.jsonl.gz")),
        *(one(tmp_path / "a.jsonl", **how) for how in read),
        replace(one(tmp_path / "a.jsonl", count=5), source=1),
        replace(one(tmp_path / "a.jsonl"), records=(0, 1)),
    ]
    identities = [json.dumps(file.identity()) for file in others]
    assert len({json.dumps(plain), *identities}) == len(others) + 1
    assert one(tmp_path / "a.jsonl").size() == 14
    gone = one(tmp_path / "a.jsonl")
    gone.path.unlink()
    for ask in (gone.identity, gone.size):
        with pytest.raises(DataError, match=r"a\.jsonl: No such file"):
            ask()


ROWS = [{"text": f"row {i}"} for i in range(40)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory as datasets' save_to_disk leaves it, written with pyarrow: two files of 25 and 15 rows."""
    return save(tmp_path / "saved", ROWS)


def save(directory: Path, rows: list[dict[str, Any]], split: str = "train") -> Path:
    directory.mkdir(parents=True)
    for i, part in enumerate((rows[:25], rows[25:])):
        write_stream(directory / f"data-{i}.arrow", pa.Table.from_pylist(part), 10)
    files = [{"filename": f"data-{i}.arrow"} for i in range(2)]
    (directory / "state.json").write_text(json.dumps({"_data_files": files, "_split": split}))
    (directory / "dataset_info.json").write_text("{}")
    return directory


@pytest.mark.parametrize(("part", "start", "stop"), tables.cases(__file__, "a_saved_data_set_and_its_slices"))
def test_a_saved_data_set_and_its_slices(saved: Path, part: str, start: int, stop: int) -> None:
    file = one(f"{saved}{part}")
    assert values(file) == ROWS[start:stop]
    assert [row.line for block in list(blocks(file))[:1] for row in records_of(block)][0] == start + 1


def test_slices_are_in_the_identity(saved: Path) -> None:
    identities = {json.dumps(one(f"{saved}{part}").identity()) for part in ("", ":train[:5]", ":train[5:]")}
    assert len(identities) == 3
    assert one(f"{saved}:train[:50%]").identity() == one(f"{saved}:train[:20]").identity()
    moved = saved.rename(saved.with_name("moved"))
    assert json.dumps(one(moved).identity()) in identities


@pytest.mark.parametrize(("part", "reason"), tables.cases(__file__, "wrong_slices_are_refused"))
def test_wrong_slices_are_refused(saved: Path, part: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        one(f"{saved}{part}")


def test_a_saved_data_set_of_several_splits(tmp_path: Path) -> None:
    save(tmp_path / "both" / "train", ROWS)
    save(tmp_path / "both" / "test", ROWS[:30])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="a data set of several splits") as caught:
        one(tmp_path / "both")
    assert caught.value.hint == "name one: both:train, both:test"
    assert values(one(f"{tmp_path}/both:test[28:]")) == ROWS[28:30]
    with pytest.raises(DataError, match="no split dev") as caught:
        one(f"{tmp_path}/both:dev")
    assert caught.value.hint == "there are train, test"


@pytest.mark.parametrize(("state", "reason"), tables.cases(__file__, "a_damaged_data_set_is_named"))
def test_a_damaged_data_set_is_named(saved: Path, state: str, reason: str) -> None:
    (saved / "state.json").write_text(state)
    with pytest.raises(DataError, match=reason):
        one(saved)
    with pytest.raises(DataError, match="no data set there"):
        one(f"{saved.parent}:train")


@pytest.mark.slow
def test_what_the_datasets_library_saves_and_caches_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    call = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    rows = [{"messages": [{"role": "assistant", "content": "é", "tool_calls": call}], "n": i} for i in range(30)]
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files, total = hub_files(str(tmp_path / "local"), "train")
    assert total == 30
    cached = SourceFile(files[0], "arrow", parts=files, records=(10, 20))
    assert values(cached) == rows[10:20]
    code = (
        "import sys; from datasets import load_dataset; d = load_dataset(sys.argv[1]); d.save_to_disk(sys.argv[2]); "
        "d['train'].save_to_disk(sys.argv[3], num_shards=2)"
    )
    arguments = [str(tmp_path / name) for name in ("local", "dict", "one")]
    forked.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
    assert values(one(f"{tmp_path}/dict:train[:50%]")) == rows[:15]
    assert values(one(tmp_path / "one")) == rows
    for name, split in (("owner/none", "train"), (str(tmp_path / "local"), "test")):
        with pytest.raises(MachineError) as caught:
            hub_files(name, split)
        assert caught.value.message.startswith(f"{name}:{split}: ")
        assert "\n" not in caught.value.message
        assert caught.value.hint
    with pytest.raises(MachineError, match="owner/none"):
        one("owner/none:train[:5%]")


def test_without_datasets_a_hub_name_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "datasets.py").write_text("raise ModuleNotFoundError('x', name='datasets')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MachineError, match="needs the datasets library") as caught:
        one("owner/name:train")
    assert caught.value.hint == "install it: pip install datasets"
    (tmp_path / "datasets.py").write_text("raise SystemExit(3)")
    with pytest.raises(MachineError, match="owner/name: exit code 3"):
        one("owner/name:train")


SPOOL = """
import sys
from tuner.config.recipe import DataSource
from tuner.data.reading.blocks import blocks
from tuner.data.sources import expand
from tuner.data.reading.blocks import records_of
from tuner.errors import TunerError
sources = [DataSource(path="-", format=sys.argv[1])]
try:
    (file,), (again,) = expand(sources), expand(sources)
except TunerError as error:
    sys.exit(error.message)
assert file.identity() == again.identity()
print(file.path, file.kind, file.compression, [row.value for block in blocks(file) for row in records_of(block)])
"""


def spooled(tmp_path: Path, data: bytes, form: str = "auto", run: Any = subprocess.run) -> list[str]:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", SPOOL, form]
    done = run(words, input=data, capture_output=True, env=environment, check=True)
    return str(done.stdout.decode()).split(" ", 3)


def test_standard_input_is_read_once_and_leaves_nothing(tmp_path: Path) -> None:
    data = b'{"text": "x"}\n{"text": "y"}\n'
    rows = "[{'text': 'x'}, {'text': 'y'}]\n"
    assert spooled(tmp_path, data)[1:] == ["jsonl", "", rows]
    # A forked process takes nothing apart at its end, so that a file with a name would stay.
    assert spooled(tmp_path, gzip.compress(data), run=forked.run)[1:] == ["jsonl", "gzip", rows]
    assert spooled(tmp_path, b"plain", "text", forked.run)[1:] == ["text", "", "[{'text': 'plain'}]\n"]
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="two sources read standard input"):
        expand([DataSource(path="-"), DataSource(path="-")])


def test_a_terminal_is_no_source(tmp_path: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", SPOOL, "auto"]
    done = forked.run(words, stdin=theirs, capture_output=True, text=True)
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "-: standard input is a terminal\n")


def prepared(place: Path, source: str, code: int, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Prepare one source with the command, which ends with this code."""
    words = ("prepare-data", "--json", "--data.train", source)
    return commands.tuner(*words, cwd=place, stdin=stdin, code=code, TMPDIR=str(place), HF_HUB_OFFLINE="1")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a recipe, whose source is given by a flag."""
    tiny.write_directory(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text("model: {name_or_path: ./model}\ndata: {train: x}\n")
    return tmp_path


@pytest.mark.slow
def test_the_command_says_that_a_hub_name_cannot_be_reached(place: Path) -> None:
    assert "Couldn't reach 'owner/none'" in prepared(place, "owner/none:train[:5%]", 4).stderr


def test_the_command_reads_sources_of_several_kinds(place: Path) -> None:
    rows = [{"prompt": f"hello {i}", "completion": "world"} for i in range(3)]
    plain = tiny.write_rows(place / "a.jsonl", rows).read_text()
    (place / "a.csv").write_text("prompt,completion\n" + "".join(f"hello {i},world\n" for i in range(3)))
    save(place / "saved", rows)
    named = "[{path: a.arrow, columns: {prompt: q, completion: a}}]"
    write_stream(
        place / "a.arrow", pa.Table.from_pylist([{"q": row["prompt"], "a": row["completion"]} for row in rows])
    )
    seen = set()
    for source in ("a.jsonl", "a.csv", "saved", "-", named):  # others: below, in the process
        done = prepared(place, source, 0, plain if source == "-" else "")
        train = json.loads(done.stdout)["metrics"]["train"]
        seen.add((train["documents"], train["tokens"], train["trained"]))
    assert len(seen) == 1
    for source, reason in [("none.jsonl", "no such file"), ("saved:test", "no split test")]:
        assert reason in prepared(place, source, 3).stderr


CHATS = [tiny.chat(f"question {i}", f"answer {i}") for i in range(6)]
PAIRS = [{"question": f"what is {i}?", "answer": f"it is {i}"} for i in range(6)]
ALPACA = [{"instruction": f"do {i}", "input": "", "output": f"done {i}"} for i in range(6)]
ROOMY = Room("this machine", 1 << 40)
TURNS = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 6


DIALOGS = [{"dialog": row["messages"], "id": i} for i, row in enumerate(CHATS)]
LAYOUTS = {"chats": CHATS, "turns": TURNS, "dialogs": DIALOGS, "alpaca": ALPACA, "pairs": PAIRS}
SOURCES: Any = tables.cases(__file__, "every_source")


def look_at(model: Path | str, path: Path) -> Look:
    return look(str(model), DataSource(path=str(path)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tiny.write_directory(tmp_path_factory.mktemp("model"))
    (directory / "config.json").write_text('{"max_position_embeddings": 1000}')
    return str(directory)


@pytest.mark.slow("table.feather", "chat.jsonl.gz")
@pytest.mark.parametrize("name", SOURCES)
def test_every_source_is_looked_at_explained_and_prepared_alike(name: str, model: str, tmp_path: Path) -> None:
    kind, form, columns = SOURCES[name]
    rows = LAYOUTS[kind]
    if name == "directory":
        (tmp_path / name).mkdir()
        for part, of in (("a", rows[:3]), ("b", rows[3:])):
            write_kind(tmp_path / name / f"{part}.jsonl", of)
    else:
        write_kind(tmp_path / name, rows)
    seen = look_at(model, tmp_path / name)
    assert (seen.form, seen.rows, seen.is_all, dict(seen.columns)) == (form, 6, True, columns)
    written = load_recipe(tmp_file(tmp_path, starter(model, str(tmp_path / name), seen, ROOMY))).recipe
    assert dict(written.data.train[0].columns) == columns
    spec = PrepareSpec(written.data, written.method.examples, tiny.tokenizer(), 256, 1, tmp_path / "cache")
    assert len(list(explain(spec, 10))) == 6
    report = prepare(spec).report["train"]
    assert (report["documents"], report["longest"]) == (6, seen.longest)
    assert seen.by_tokenizer


def tmp_file(tmp_path: Path, text: str) -> Path:
    (tmp_path / "recipe.yaml").write_text(text)
    return tmp_path / "recipe.yaml"


def test_without_the_tokenizer_characters_are_counted(tmp_path: Path) -> None:
    seen = look_at("owner/name", tiny.write_rows(tmp_path / "rows.jsonl", [{"text": "x" * 300}]))
    assert (seen.pretrain, seen.by_tokenizer, seen.longest) == (True, False, 100)
    assert "estimated from characters" in starter("owner/name", "rows.jsonl", seen, ROOMY)


def test_of_a_hub_name_only_what_is_cached_counts(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    path = tiny.write_rows(tmp_path / "rows.jsonl", CHATS)
    cached = {"owner/here": model}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda name, file: f"{model}/{file}" if name in cached else None
    )
    assert look_at("owner/here", path).by_tokenizer
    assert not look_at("owner/away", path).by_tokenizer
    monkeypatch.undo()
    assert not look_at("no such/name/at all", path).by_tokenizer


def test_a_tokenizer_without_a_template_is_given_one(tmp_path: Path) -> None:
    directory = tiny.write_directory(tmp_path / "base")
    (directory / "chat_template.jinja").unlink()
    path = tiny.write_rows(tmp_path / "rows.jsonl", CHATS)
    seen = look_at(directory, path)
    text = starter(str(directory), str(path), seen, ROOMY)
    assert load_recipe(tmp_file(tmp_path, text)).recipe.tokenizer.chat_template == "chatml"
    pairs = tiny.write_rows(tmp_path / "pairs.jsonl", [{"prompt": "a", "completion": "b"}])
    assert look_at(directory, pairs).template == ""
    write_kind(tmp_path / "pairs.csv", PAIRS)
    without = look_at(directory, tmp_path / "pairs.csv")
    assert without.form == "prompt_completion"
    assert dict(without.columns) == {"prompt": "question", "completion": "answer"}


@pytest.mark.parametrize(
    ("gb", "adapter", "quantize", "lr"),
    [(200, "none", "none", 1e-6), (24, "lora", "none", 1e-5), (12, "lora", "nf4", 1e-5)],
)
def test_a_model_that_is_large_for_the_machine_is_adapted(
    gb: int, adapter: str, quantize: str, lr: float, model: str, tmp_path: Path
) -> None:
    rows = [{"prompt": f"a {i}", "chosen": "good", "rejected": "bad"} for i in range(60)]
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows)
    seen = replace(look_at(model, path), parameters=8_030_000_000)
    text = starter(model, str(path), seen, Room("this machine", gb * 10**9))
    recipe = load_recipe(tmp_file(tmp_path, text)).recipe
    assert (recipe.adapter.kind, recipe.model.quantize, recipe.optimizer.lr) == (adapter, quantize, lr)
    assert ("to train all 8.0 billion weights takes about 128 GB, and this machine has" in text) == (gb < 200)


def test_the_weights_of_a_model_are_counted_by_its_files(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    directory = tiny.write_directory(tmp_path / "base")
    path = tiny.write_rows(tmp_path / "rows.jsonl", CHATS)
    assert look_at(directory, path).parameters is None
    for number in range(2):
        tensors = {f"w{number}": np.zeros((3, 5), np.float32), f"b{number}": np.zeros(2)}
        save_file(tensors, directory / f"{number}.safetensors")
    assert look_at(directory, path).parameters == 34


@pytest.mark.parametrize("keys", [("question", "response", "context"), ("instruction", "output", "context")])
def test_a_context_is_read_as_input_and_what_is_not_is_named(keys: tuple[str, ...], model: str, tmp_path: Path) -> None:
    rows = [{**{key: f"hello {key}" for key in keys}, "url": "there", "id": 1}]
    seen = look_at(model, tiny.write_rows(tmp_path / "rows.jsonl", rows))
    assert (seen.form, seen.columns["input"], seen.unused) == ("alpaca", "context", ("url",))
    text = starter(model, "rows.jsonl", seen, ROOMY)
    assert "# 1 record: alpaca; not used: url" in text
    assert dict(load_recipe(tmp_file(tmp_path, text)).recipe.data.train[0].columns) == dict(seen.columns)


@pytest.mark.parametrize(
    ("row", "method", "columns"), cases("suggested_methods", "row", "method", "columns", name="row")
)
def test_answers_that_are_compared_get_their_method(
    row: dict[str, Any], method: str, columns: dict[str, str], model: str, tmp_path: Path
) -> None:
    seen = look_at(model, tiny.write_rows(tmp_path / "rows.jsonl", [row]))
    text = starter(model, "rows.jsonl", seen, ROOMY)
    assert f"  kind: {method} " in text and dict(seen.columns) == columns and seen.by_tokenizer and seen.unused == ()
    assert "optimizer: {lr: 1e-6}" in text
    if method == "dpo":  # both answers with their prompt
        assert f"longest pair: {seen.longest}" in text
        assert load_recipe(tmp_file(tmp_path, text)).recipe.method.kind == "dpo"


@pytest.mark.parametrize(
    ("count", "words", "steps"),
    [(400, 30, FEW_STEPS), pytest.param(700, 60, FEW_STEPS, marks=pytest.mark.slow), (20, 3, 1)],
)
def test_what_is_chosen_gives_enough_steps_where_the_data_allow(
    count: int, words: int, steps: int, model: str, tmp_path: Path
) -> None:
    drawn = random.Random(1)
    rows = [tiny.chat(f"question {i}", "hello " * drawn.randint(1, words)) for i in range(count)]
    seen = look_at(model, tiny.write_rows(tmp_path / "rows.jsonl", rows))
    assert seen.steps >= steps and seen.longer_tokens <= 0.01 and seen.max_length <= 1000
    path = tmp_path / "rows.jsonl"
    report = prepare(tiny.request(tmp_path / "cache", path, max_length=seen.max_length)).report["train"]
    assert report["packed_rows"] == pytest.approx(seen.packed_rows, rel=0.1, abs=1)
    text = starter(model, str(path), seen, ROOMY)
    assert f"{seen.steps} steps" in text and (", which is few" in text) == (seen.steps < FEW_STEPS)


def test_large_sources_are_estimated_by_a_part(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in range(8):
        tiny.write_rows(tmp_path / f"{part}.jsonl", [tiny.chat(f"question {part} {i}", "answer") for i in range(50)])
    whole = look_at(model, tmp_path)
    monkeypatch.setattr(module, "READ_BYTES", 6000)
    part = look_at(model, tmp_path)
    assert (whole.is_all, part.is_all) == (True, False)
    assert part.rows == pytest.approx(whole.rows, rel=0.05) == 400
    assert part.packed_rows == pytest.approx(whole.packed_rows, rel=0.1, abs=1)
    assert f"about {part.rows:,} records: messages" in starter(model, "rows", part, ROOMY)


def test_few_plain_documents_stay_whole(model: str, tmp_path: Path) -> None:
    texts = ["hello world, the answer is forty two\n" * count for count in (3, 20, 35, 50, 60)]
    seen = look_at(model, tiny.write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts]))
    assert seen.longer == 0 and 256 < seen.longest <= seen.max_length


def test_bad_rows_are_counted_and_named_and_no_reason_to_stop(model: str, tmp_path: Path) -> None:
    bad = [{"question": "what?", "answer": ""}, {"question": "why?", "answer": 3}]
    seen = look_at(model, tiny.write_rows(tmp_path / "rows.jsonl", [*bad, *PAIRS]))
    assert (seen.rows, seen.bad, dict(seen.columns)) == (6, 2, {"instruction": "question", "output": "answer"})
    assert seen.first_bad == f"{tmp_path}/rows.jsonl:1:33: answer: output is empty"
    text = starter(model, f"{tmp_path}/rows.jsonl", seen, ROOMY)
    recipe = load_recipe(tmp_file(tmp_path, text.replace("# on_bad_row: skip", "on_bad_row: skip"))).recipe
    assert "2 rows cannot be read" in text and recipe.data.on_bad_row == "skip"
    spec = PrepareSpec(recipe.data, recipe.method.examples, tiny.tokenizer(), 256, 1, tmp_path / "cache")
    assert prepare(spec).report["train"]["documents"] == 6
    with pytest.raises(DataError, match="bad.jsonl:1:1: ") as caught:
        look_at(model, tiny.write_rows(tmp_path / "bad.jsonl", bad))
    assert caught.value.hint == "all of its 2 rows are bad, this one first: fix them"  # and no key of a recipe


def test_the_reading_is_what_suits_the_first_rows_and_not_the_first_one(model: str, tmp_path: Path) -> None:
    assert look_at(model, tiny.write_rows(tmp_path / "rows.jsonl", [{"text": "a stray"}, *CHATS])).kind == "sft"
    seen = look_at(model, tiny.write_rows(tmp_path / "more.jsonl", [{"text": "a stray"}, *PAIRS]))
    assert dict(seen.columns) == {"instruction": "question", "output": "answer"} and seen.bad == 1
    spoken = [{"messages": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]}]
    path = tiny.write_rows(tmp_path / "spoken.jsonl", spoken)
    text = starter(model, str(path), look_at(model, path), ROOMY)
    assert load_recipe(tmp_file(tmp_path, text)).recipe.data.train[0].format == "sharegpt"


def test_plain_text_gets_rows_that_are_short_enough(model: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world, the answer is forty two\n" * 3000)
    seen = look_at(model, tmp_path / "a.txt")
    assert (seen.pretrain, seen.max_length, seen.epochs, seen.global_batch_size) == (True, 512, 1, 1)
    text = starter(model, "a.txt", seen, ROOMY)
    assert "; 1 document (100.0% of the tokens) is longer and split: longer rows would be too few" in text


def test_a_sample_of_a_large_source_is_drawn_from_all_over_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows come first: what is seen of the first alone would be another length, and no bad row."""
    rows = [tiny.chat(f"question {i}", "hello " * 10) for i in range(900)]
    rows += [tiny.chat(f"question {i}", "hello " * 300) for i in range(100)]
    path = tiny.write_rows(tmp_path / "rows.jsonl", [*rows, {"messages": [{"role": "user", "content": 3}]}])
    whole = look_at(model, path)
    monkeypatch.setattr(module, "SAMPLE_COST", 60_000)
    part = look_at(model, path)
    assert (whole.is_counted, part.is_counted) == (True, False)
    for seen in (whole, part):
        assert (seen.rows, seen.bad, seen.longer) == (1000, 1, 0) and seen.longest <= seen.max_length
    assert part.max_length == whole.max_length
    assert part.longest == pytest.approx(whole.longest, rel=0.05)
    assert part.packed_rows == pytest.approx(whole.packed_rows, rel=0.1, abs=1)
    assert "longest document: about " in starter(model, str(path), part, ROOMY)
