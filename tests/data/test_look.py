"""What `tuner init` finds of a source: with the readers of preparation, in every form, and what it chooses."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data import tiny
from tests.data.reading.cases import cases
from tests.data.reading.files import write_kind
from tests.fixtures import tables
from tuner.config.load import load_recipe
from tuner.config.recipe import DataSource
from tuner.config.starter import FEW_STEPS, Room, starter
from tuner.data import look as module
from tuner.data.building.documents import explain
from tuner.data.building.prepare import prepare
from tuner.data.building.spec import PrepareSpec
from tuner.data.look import Look, look
from tuner.errors import DataError

CHATS = [tiny.chat(f"question {i}", f"answer {i}") for i in range(6)]
PAIRS = [{"question": f"what is {i}?", "answer": f"it is {i}"} for i in range(6)]
ALPACA = [{"instruction": f"do {i}", "input": "", "output": f"done {i}"} for i in range(6)]
ROOMY = Room("this machine", 1 << 40)
TURNS = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 6


DIALOGS = [{"dialog": row["messages"], "id": i} for i, row in enumerate(CHATS)]
ROWS = {"chats": CHATS, "turns": TURNS, "dialogs": DIALOGS, "alpaca": ALPACA, "pairs": PAIRS}
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
    rows = ROWS[kind]
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
def test_a_context_is_read_as_input_and_what_is_not_read_is_named(
    keys: tuple[str, ...], model: str, tmp_path: Path
) -> None:
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


def test_large_sources_are_read_in_part_and_estimated(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
