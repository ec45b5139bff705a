"""Directories in object stores and the stages that stand for them."""

from pathlib import Path

import pytest

from tuner.config.load import Override, RecipeText, load_recipe, recipe_dict, recipe_yaml
from tuner.config.store_rules import inputs_of
from tuner.errors import RecipeError
from tuner.stages import is_url, shown, stage_of, url_of

RECIPE = """\
model: {name_or_path: "s3://m/llama", init_from: [{path: "gs://w/runs/x"}]}
data: {train: ["s3://d/rows/*.jsonl", {path: "s3://d/b.jsonl[:10%]", weight: 2}, here.jsonl], eval: "az://d/held.jsonl"}
output_dir: s3://b/runs/{name}
name: first
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    return tmp_path / "stores"


@pytest.mark.parametrize("url", ["s3://bucket/runs/x", "gs://b/x", "az://c/a b/ü.jsonl", "s3://b/d/**/*.jsonl[:10%]"])
def test_a_url_and_its_stage_stand_for_each_other(url: str, cache: Path) -> None:
    stage = stage_of(url)
    assert is_url(url)
    assert stage == cache / url.replace("://", "/")
    assert (url_of(stage), shown(stage), stage_of(f"{url}/")) == (url, url, stage)


def test_what_is_no_stage_has_no_url(cache: Path) -> None:
    others = ["stores/s3", "stores/s3/b", "stores/.etags/b/x", "s3/b/x"]
    assert [url_of(cache.parent / name) for name in others] == [None] * len(others)
    assert shown(Path("x")) == "x"


def test_a_stage_is_known_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real" / "stores").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "link"))
    assert url_of((tmp_path / "real" / "stores" / "s3" / "b" / "x").resolve()) == "s3://b/x"


def test_a_file_url_is_a_path() -> None:
    assert stage_of("file:///data/../runs/x") == Path("/runs/x")
    assert url_of(stage_of("file:///runs/x")) is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3a://b/x", "write s3://"),
        ("S3://b/x", "write s3://"),
        ("gcs://b/x", "write gs://"),
        ("hdfs://b/x", "known are s3://, gs://, az:// and file://"),
        ("s3://b", "s3://b/DIRECTORY"),
        ("s3://", "s3://BUCKET/DIRECTORY"),
        ("s3://b//x", "are not empty"),
        ("s3://b/../x", "not . or .."),
        ("s3://b/a\\x", "backslash"),
        ("s3://key:secret@b/x", "no credentials"),
        ("file://host/x", "file:///"),
    ],
)
def test_what_names_no_directory_is_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        stage_of(url)
    assert words in str(caught.value)
    with pytest.raises(RecipeError) as refused:
        load_recipe(RecipeText(RECIPE), [Override("output_dir", url)])
    assert words in str(refused.value)


def test_addresses_of_pages_are_no_places() -> None:
    assert not any(is_url(text) for text in ("https://hub.co/x", "owner/name", "owner/name:train", "./s3:/x", "hf://x"))


def test_a_recipe_works_on_stages_and_is_written_with_urls(cache: Path) -> None:
    loaded = load_recipe(RecipeText(RECIPE))
    recipe = loaded.recipe
    assert recipe.output_dir == str(cache / "s3" / "b" / "runs" / "first")
    assert {key: [shown(path) for path in paths] for key, paths in inputs_of(recipe).items()} == {
        "model.name_or_path": ["s3://m/llama"],
        "model.init_from": ["gs://w/runs/x"],
        "data.train": ["s3://d/rows/*.jsonl", "s3://d/b.jsonl[:10%]"],
        "data.eval": ["az://d/held.jsonl"],
    }
    written = recipe_dict(recipe)
    assert (written["output_dir"], written["data"]["train"][0]["path"]) == ("s3://b/runs/first", "s3://d/rows/*.jsonl")
    assert str(cache) not in recipe_yaml(recipe)
    assert load_recipe(RecipeText(recipe_yaml(recipe))).recipe == recipe == load_recipe(written).recipe


def test_what_lies_on_a_disk_alone_takes_no_store() -> None:
    for key in ("train.stop_file", "tokenizer.name_or_path", "tokenizer.chat_template"):
        with pytest.raises(RecipeError, match=r"lies on a disk; in a store may be .*output_dir"):
            load_recipe(RecipeText(RECIPE), [Override(key, "s3://b/x")])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data.windows.files": "1"}, "or remove data.windows"),
        ({"data.windows.files": "1", "data.train": "w", "data.cache_dir": "s3://b/c"}, "is prepared of windows lies"),
        ({"model.init_from.0.every": "10 steps"}, "or remove every"),
        ({"ladder.sizes": "[190M]"}, "the runs of a ladder lie on a disk"),
    ],
)
def test_what_is_looked_at_again_is_on_a_disk(values: dict[str, str], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(RecipeText(RECIPE), [Override(*value) for value in values.items()])
    assert words in str(caught.value)
