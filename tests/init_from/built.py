"""Models built as a training builds them, with weights from elsewhere, and directories to take these from."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model.tiny import family_config
from tests.train.synthetic import MAX_LENGTH, recipe_for
from tuner.config.recipe import Recipe
from tuner.init_from.match import InitPlan
from tuner.model.build import model_config
from tuner.parallel.mesh import Mesh
from tuner.runtime.dist import RankInfo
from tuner.setup.initial import planned
from tuner.setup.model import LoadedModel, load_model
from tuner.setup.resolve import model_spec, resolve
from tuner.setup.specs import assembly_spec, trainable_of

LORA = {"kind": "lora", "r": 4, "alpha": 8}
TENSORS = dict[str, torch.Tensor]


def write_family(
    directory: Path, family: str = "llama", seed: int = 1, tied: bool = False, vocabulary: int = 97
) -> Path:
    """A model directory with random weights of this seed."""
    config = family_config(family, tied)
    config.vocab_size = vocabulary
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    return directory


def rewrite(source: Path, directory: Path, rename: Any = lambda name: name) -> Path:
    """A directory with the same tensors under other names; one whose new name is None is left out."""
    directory.mkdir()
    tensors = {rename(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    tensors.pop(None, None)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text((source / "config.json").read_text())
    return directory


def write_peft(base: Path, directory: Path, **config: Any) -> tuple[Path, TENSORS]:
    """An adapter's directory as peft saves it, moved a little from its start; and the base with it merged, by peft."""
    torch.manual_seed(3)
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **config}
    model: Any = get_peft_model(plain, LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(directory)
    return directory, dict(model.merge_and_unload().state_dict())


def recipe_of(directory: Path, *entries: Any, init: str = "pretrained", **sections: Any) -> Recipe:
    """A recipe of a model that is given these."""
    own = {"name_or_path": str(directory), "init": init, "init_from": list(entries), **sections.pop("model", {})}
    return recipe_for(directory, model=own, **sections)


def planned_for(recipe: Recipe) -> InitPlan:
    """What a recipe's model would be given, by headers alone."""
    config = model_config(model_spec(recipe, range(0)))
    return planned(recipe, config, trainable_of(recipe, range(0)))


def built(recipe: Recipe, new_ids: range = range(0)) -> LoadedModel:
    """The model of a recipe as a training starts with it."""
    resolved = resolve(recipe, MAX_LENGTH, RankInfo(), new_ids)
    return load_model(resolved, assembly_spec(resolved), Mesh(), torch.device("cpu"))


def values(model: LoadedModel) -> TENSORS:
    """Its parameters by name, without what peft adds to the names."""
    return {name.replace(".base_layer.", "."): tensor.detach() for name, tensor in model.root.model.named_parameters()}


def held(directory: Path) -> TENSORS:
    """The weights that a directory of a plain model holds, by the names in its class."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def given(model: LoadedModel) -> dict[str, Any]:
    """What was noted of what it was given, without its report."""
    found = model.facts.given
    assert found is not None
    return json.loads(json.dumps({key: found[key] for key in ("entries", "frozen")}))  # type: ignore[no-any-return]


def same(found: TENSORS, wanted: TENSORS) -> set[str]:
    """The names whose tensors are not equal to the last bit."""
    assert found.keys() == wanted.keys()
    return {name for name in found if not torch.equal(found[name], wanted[name])}
