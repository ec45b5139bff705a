"""A model class of the user's own trains, resumes, is exported and read as transformers' own are, by its code alone."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.fixtures import trainings
from tests.fixtures.tables import cases
from tests.fixtures.trainings import launch, outcome
from tuner.api.exports import export_hf
from tuner.errors import DataError, PluginError
from tuner.model.own_class import register
from tuner.runtime.files import sha256_file

CODE = """\
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
    (tmp_path / "mine.py").write_text(CODE)
    place = tmp_path / "model" / "config.json"
    flags = {"train.duration": "4 steps", "export.dtype": "fp32"}
    plain = outcome(launch(tmp_path, name="plain", **flags).run_dir)
    place.write_text(json.dumps(json.loads(place.read_text()) | {"model_type": "my_llama"}))
    flags |= {"name": "own", "model.use": "mine.py:Mine"}
    stopped = launch(tmp_path, **flags, **{"train.stop_after": "2 steps"})
    assert stopped.status == "stopped"
    (tmp_path / "mine.py").write_text(CODE.replace("* self.config.twist", "/ self.config.twist"))
    with pytest.raises(DataError, match="the code of model.use .*mine.py:Mine changed since"):
        launch(tmp_path, "auto", **flags)
    (tmp_path / "mine.py").write_text(CODE)
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
    (tmp_path / "other.py").write_text(CODE)
    with pytest.raises(PluginError, match=said):
        register(f"{tmp_path / 'other.py'}:{name}")
