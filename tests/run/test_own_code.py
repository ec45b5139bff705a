"""Code of the user's own: a model class trains, resumes, is exported and read as transformers' own are, by its code
alone; records that code yields train as a file of them does, and the code runs when it has to.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.fixtures import trainings
from tests.fixtures.commands import tuner
from tests.fixtures.tables import cases
from tests.fixtures.trainings import launch, outcome
from tuner.api.exports import export_hf
from tuner.config.recipe import DataSource
from tuner.data.reading import spool as module
from tuner.data.sources import expand
from tuner.errors import DataError, PluginError, TunerError
from tuner.model.own_class import register
from tuner.runtime.files import sha256_file

OWN_CLASS = """\
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

class MyConfig(LlamaConfig):
    model_type = "my_llama"
    twist: float = 0.5

class MyMLP(LlamaMLP):
    def forward(self, hidden):
        return super().forward(hidden) * self.config.twist

class Mine(LlamaForCausalLM):
    config_class = MyConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = MyMLP(config)
        self.post_init()

class Theirs(LlamaForCausalLM):
    pass

class NoType(PretrainedConfig):
    model_type = ""

class Untyped(PreTrainedModel):
    config_class = NoType

def function():
    return 1
"""


def test_it_trains_resumes_and_is_exported_with_its_config(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1)
    (tmp_path / "mine.py").write_text(OWN_CLASS)
    place = tmp_path / "model" / "config.json"
    flags = {"train.duration": "4 steps", "export.dtype": "fp32"}
    plain = outcome(launch(tmp_path, name="plain", **flags).run_dir)
    place.write_text(json.dumps(json.loads(place.read_text()) | {"model_type": "my_llama"}))
    flags |= {"name": "own", "model.use": "mine.py:Mine"}
    stopped = launch(tmp_path, **flags, **{"train.stop_after": "2 steps"})
    assert stopped.status == "stopped"
    (tmp_path / "mine.py").write_text(OWN_CLASS.replace("* self.config.twist", "/ self.config.twist"))
    with pytest.raises(DataError, match="the code of model.use .*mine.py:Mine changed since"):
        launch(tmp_path, "auto", **flags)
    (tmp_path / "mine.py").write_text(OWN_CLASS)
    found = launch(tmp_path, "auto", **flags)
    own = outcome(found.run_dir)
    assert [line["loss"] for line in own["log"]] != [line["loss"] for line in plain["log"]]
    noted = trainings.saved(found.run_dir).meta["model"]["code"]
    assert noted == {"use": f"{tmp_path / 'mine.py'}:Mine", "sha256": sha256_file(tmp_path / "mine.py")}
    report = export_hf(found.run_dir, dtype="fp32")  # whose answers are held against the trained model's
    config = json.loads((report.path / "config.json").read_text())
    assert (config["model_type"], config["twist"], config["architectures"]) == ("my_llama", 0.5, ["Mine"])
    assert "| model class | Mine, code of its own" in (report.path / "README.md").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(report.path)
    assert type(loaded) is register(f"{tmp_path / 'mine.py'}:Mine")


@pytest.mark.parametrize(("name", "said"), cases(__file__, "what_is_no_model_class_of_its_own_is_refused"))
def test_what_is_no_model_class_of_its_own_is_refused(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(OWN_CLASS)
    with pytest.raises(PluginError, match=said):
        register(f"{tmp_path / 'other.py'}:{name}")


CODE = """\
from pathlib import Path

def rows(count, word="a"):
    log = Path(__file__).with_name("ran")
    log.write_text(log.read_text() + "x" if log.exists() else "x")
    for number in range(count):
        yield {"prompt": f"{word}{number} ", "completion": word * 9}

def keyed(count):
    return rows(count)

keyed.content_key = lambda count: Path(__file__).with_name("version").read_text()

def lists(count):
    yield {"prompt": "a", "completion": "b"}
    yield [count]

def sets():
    yield {"prompt": {1}, "completion": "b"}

def nothing():
    return []

def fails():
    yield {"prompt": "a", "completion": "b"}
    raise KeyError("no such table")

def unopened():
    yield {"prompt": "a", "completion": "b"}
    open("/nowhere/at/all")

unopened.content_key = lambda: "1"

def odd():
    return []

odd.content_key = lambda: 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "my_rows.py").write_text(CODE)
    (tmp_path / "version").write_text("1")
    return tmp_path / "my_rows.py"


def source(file: Path, name: str, **args: Any) -> DataSource:
    return DataSource(use=f"{file}:{name}", args=args)


def ran(file: Path) -> int:
    log = file.with_name("ran")
    return len(log.read_text()) if log.exists() else 0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_it_yields_is_a_file_of_records(file: Path) -> None:
    (found,) = expand([source(file, "rows", count=3)])
    assert (found.kind, found.name) == ("jsonl", f"{file}:rows")
    assert read(found.path)[2] == {"prompt": "a2 ", "completion": "a" * 9}
    expand([source(file, "rows", count=3)])
    assert ran(file) == 1, "once in a process"
    (other,) = expand([source(file, "rows", count=3, word="b")])
    assert read(other.path)[0]["completion"] == "b" * 9 and ran(file) == 2


def test_with_a_key_it_runs_again_only_for_another_one(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (found,) = expand([source(file, "keyed", count=3)], cache)
    assert found.path.parent == cache / module.KEPT and len(read(found.path)) == 3
    assert expand([source(file, "keyed", count=3)], cache) == [found] and ran(file) == 1
    assert expand([source(file, "keyed", count=4)], cache) != [found] and ran(file) == 2
    file.with_name("version").write_text("2")
    assert expand([source(file, "keyed", count=3)], cache) != [found] and ran(file) == 3
    assert len(list((cache / module.KEPT).iterdir())) == 3, "nothing half written is left"


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("lists", DataError, "record 2 is a list, and has to be a mapping"),
        ("sets", DataError, "record 1 is no JSON"),
        ("nothing", DataError, "it yielded no record"),
        ("fails", PluginError, "KeyError: 'no such table' .*my_rows.py:26"),
        ("unopened", PluginError, "No such file or directory: '/nowhere/at/all' .*my_rows.py:30"),
        ("odd", PluginError, "content_key returned 3"),
        ("absent", PluginError, "has no absent"),
    ],
)
def test_what_is_wrong_with_it_is_said_by_name(
    name: str, kind: type[TunerError], said: str, file: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=said):
        expand([source(file, name, **({"count": 1} if name == "lists" else {}))], tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/*"))


def test_arguments_that_it_does_not_take_are_refused(file: Path) -> None:
    with pytest.raises(PluginError, match="has no option counts"):
        expand([source(file, "rows", counts=3)])


def test_a_run_on_it_is_the_run_on_its_file(workplace: Path, file: Path) -> None:
    (found,) = expand([source(file, "rows", count=24)])
    (workplace / "plain.jsonl").write_bytes(found.path.read_bytes())
    plain = launch(workplace, name="plain", data__train="plain.jsonl", train__duration="3 steps")
    for name in ("rows", "keyed"):
        given = json.dumps([{"use": f"{file}:{name}", "args": {"count": 24}}])
        made = launch(workplace, name=name, data__train=given, train__duration="3 steps")
        assert outcome(made.run_dir) == outcome(plain.run_dir)
    report = (made.run_dir / "run.json").read_text()
    assert "my_rows.py:keyed" in report or made.status == "finished"


def test_a_run_on_it_is_resumed_by_its_directory(workplace: Path, file: Path) -> None:
    given = json.dumps([{"use": f"{file}:keyed", "args": {"count": 24}}])
    whole = launch(workplace, name="whole", data__train=given, train__duration="4 steps")
    launch(workplace, name="broken", data__train=given, train__duration="4 steps", train__stop_after="2 steps")
    done = tuner("resume", "runs/broken", cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert outcome(workplace / "runs" / "broken") == outcome(whole.run_dir)


def test_a_recipe_with_it_is_checked_and_written_back(file: Path, tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1, layers=1)
    text = (tmp_path / "r.yaml").read_text()
    lines = [line for line in text.splitlines() if "train:" not in line or "rows" not in line]
    assert len(lines) < len(text.splitlines())
    for given, said in (
        ("[{use: my_rows.py:rows, args: {count: 24}}]", ""),
        ("[{use: my_rows.py:absent}]", "absent"),
        ("[{use: my_rows.py:rows, path: x.jsonl}]", "path and use exclude each other"),
        ("[{weight: 2}]", "path: missing"),
    ):
        done = tuner("config", "check", "r.yaml", "--data.train", given, cwd=tmp_path)
        assert (done.returncode, said in done.stderr) == (2 if said else 0, True), done.stderr
