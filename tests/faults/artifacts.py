"""Artifacts made to do harm: pickles, names, configs, tokenizers, templates, rows, and the commands that meet them."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.cases import RUN
from tests.fixtures.tables import cases

EVIL = """\
import os, socket
open({canary!r}, "w").close()
"""
TRAIN = ("train", "{inputs}/r.yaml", "--name", "b")
"""On the inputs, in a run of its own."""
GENERATE = ("generate", "{model}", "--prompt", "a")
EXPORT = ("export-hf", str(RUN / "checkpoints" / "step-4"), "--output", "out")
RESUME = ("resume", str(RUN))


@dataclass(frozen=True)
class Place:
    """What a planter may write to: the root with a trained run, the base model, the rows, the recipe, the canary."""

    root: Path
    inputs: Path
    canary: Path

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.root / RUN

    @property
    def newest(self) -> Path:
        """Its newest checkpoint."""
        return self.run / "checkpoints" / "step-4"

    @property
    def model(self) -> Path:
        """The base model."""
        return self.inputs / "model"

    def directory(self, of: str) -> Path:
        """The directory of a run, a checkpoint or a model."""
        return {"run": self.run, "checkpoint": self.newest, "model": self.model}[of]

    @property
    def outside(self) -> Path:
        """A directory that no command is given."""
        return self.inputs / "outside"

    def words(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """A command with what it is given here."""
        return tuple(word.format(inputs=self.inputs, model=self.model, run=self.run) for word in command)

    def replace(self, old: object, new: object) -> None:
        """Have the recipe say something else."""
        recipe = self.inputs / "r.yaml"
        recipe.write_text(recipe.read_text().replace(str(old), str(new)))


@dataclass(frozen=True)
class Artifact:
    """One attempt: how it is planted, the command that meets it, and the words by which it must be named."""

    name: str
    plant: Callable[[Place], object]
    command: tuple[str, ...]
    """What is between braces the place knows."""
    named: str
    refused: bool | None = True
    """Whether the command must fail, by name; None where it may as well do without, or pass over what is wrong."""


class Bomb:
    """What runs when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.canary}'",)


def bomb(place: Place) -> bytes:
    """A pickle that touches the canary, written by hand: a call of `posix.system`."""
    return f"cposix\nsystem\n(S'touch {place.canary}'\ntR.".encode()


def torch_bomb(path: Path, place: Place) -> None:
    """The same inside torch's zip."""
    import torch

    torch.save({"w": Bomb(place.canary)}, path)


def _pickled(name: str, of: str, command: tuple[str, ...]) -> Artifact:
    """A file of a trained run replaced by a pickle."""

    def plant(place: Place) -> None:
        overwrite(place.directory(of) / name, bomb(place))

    return Artifact(f"pickle as {of}/{name}", plant, command, name.rpartition("/")[2])


def overwrite(path: Path, data: bytes) -> None:
    """Put a file of its own in the place of whatever is there."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _edited(path: Path, **fields: Any) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | fields))


def _resealed(directory: Path, **files: Any) -> None:
    """Change a checkpoint's file list and give its manifest a hash that fits."""
    from tuner.checkpoint.manifest import sealed

    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"] |= files
    (directory / "manifest.json").write_text(json.dumps(sealed(manifest)))


def rehashed(directory: Path, name: str) -> None:
    """Describe a changed file of a checkpoint so that its hash fits."""
    import hashlib

    data = (directory / name).read_bytes()
    _resealed(directory, **{name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}})


def _index(place: Place, file: str) -> None:
    """Have the checkpoint's index, with a hash that fits, take a tensor from `file`."""
    path = place.newest / "index.json"
    document = json.loads(path.read_text())
    next(iter(document["tensors"].values()))["chunks"][0]["file"] = file
    path.write_text(json.dumps(document))
    rehashed(place.newest, "index.json")


def _weights_index(place: Place, file: str) -> None:
    """Have the base model's weights come from `file`, by an index."""
    from safetensors import safe_open

    with safe_open(place.model / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
    (place.model / "model.safetensors").rename(place.inputs / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
    (place.model / "model.safetensors.index.json").write_text(json.dumps(index))


def _code(place: Place, **config: Any) -> None:
    """Code beside the base model, and a config that asks for it."""
    for name in ("evil", "modeling_evil", "configuration_evil", "tokenization_evil", "generate"):
        (place.model / f"{name}.py").write_text(EVIL.format(canary=str(place.canary)))
    _edited(place.model / "config.json", **config)


def byte_tokenizer(directory: Path) -> None:
    """Write the tokenizer of bytes into a directory."""
    from tuner.data.encoding.tokenizer import byte_files

    for name, data in byte_files().items():
        (directory / name).write_bytes(data)


def _own_tokenizer(place: Place, template: str | None = None, **config: Any) -> None:
    """A tokenizer directory beside the model, used by the recipe, with these settings."""
    directory = place.inputs / "tokenizer"
    directory.mkdir()
    byte_tokenizer(directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template % place.canary if "%s" in template else template)
        rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 20
        (place.inputs / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _edited(directory / "tokenizer_config.json", **config)
    _code(place)
    for path in place.model.glob("*.py"):
        shutil.copy(path, directory)
    place.replace("name_or_path: byte", f"name_or_path: {directory}")


ESCAPES: Any = cases(__file__, "escapes")
EXPLOSIONS = {
    "memory": "{{ 'a' * 4000000000 }}",
    "time": "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + 3 * "{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


def artifacts() -> Iterator[Artifact]:
    """All attempts."""
    yield from _in_runs()
    yield from _in_models()
    yield from _in_tokenizers()
    yield from _in_data()


def _in_runs() -> Iterator[Artifact]:
    for name in ("rank-0000-of-0001.safetensors", "index.json", "state.json", "probe.safetensors", "manifest.json"):
        yield _pickled(name, "checkpoint", EXPORT)
    for name in ("run.json", "recipe.resolved.yaml"):
        yield _pickled(name, "run", RESUME)
    for name in ("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "model_config/config.json"):
        yield _pickled(name, "run", EXPORT)
    yield Artifact("a shard of pickles, resealed", _pickled_shard, EXPORT, "rank-0000-of-0001.safetensors")
    for file in ("../../../../../inputs/elsewhere.safetensors", "/etc/passwd", "index.json/../../x", "state.json\0"):
        yield Artifact(f"index to {file!r}", partial(_index, file=file), EXPORT, "index.json")
    for file in ("../../run.json", "/etc/passwd", "a/../../b"):
        yield Artifact(f"manifest to {file!r}", partial(_listed, file=file), EXPORT, "unsafe file name")
    yield Artifact("a shard that is a link", _linked_shard, EXPORT, "rank-0000-of-0001.safetensors")
    yield Artifact("a checkpoint that is a link", _linked_step, EXPORT, "step-4")


def _listed(place: Place, file: str) -> None:
    _resealed(place.newest, **{file: {"size": 1, "sha256": "0" * 64}})


def _pickled_shard(place: Place) -> None:
    torch_bomb(place.newest / "rank-0000-of-0001.safetensors", place)
    rehashed(place.newest, "rank-0000-of-0001.safetensors")


def _linked_shard(place: Place) -> None:
    shard = place.newest / "rank-0000-of-0001.safetensors"
    shard.rename(place.inputs / "shard")
    shard.symlink_to(place.inputs / "shard")


def _linked_step(place: Place) -> None:
    place.newest.rename(place.inputs / "step-4")
    place.newest.symlink_to(place.inputs / "step-4")
    (place.inputs / "step-4" / "manifest.json").write_bytes(bomb(place))


_CONFIGS: dict[str, Any] = cases(__file__, "configs")
"""Keys of a base model's config and what they ask for."""


def _in_models() -> Iterator[Artifact]:
    yield _pickled("model.safetensors", "model", TRAIN)
    yield _pickled("config.json", "model", TRAIN)
    yield Artifact("only pytorch_model.bin", _only_bin, TRAIN, "safetensors")
    for file in ("../elsewhere.safetensors", "pytorch_model.bin"):
        yield Artifact(f"weights index to {file}", partial(_weights_index, file=file), TRAIN, file)
    auto = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    new = partial(_code, auto_map=auto, model_type="evil")
    yield Artifact("auto_map of a new type", new, TRAIN, "config.json: auto_map")
    for command in (TRAIN, GENERATE):
        for key, value in _CONFIGS.items():
            plant = partial(_code, **{key: value})
            yield Artifact(f"{command[0]} of a config with {key}", plant, command, f"config.json: {key}")
    known = partial(_code, auto_map=auto)
    yield Artifact("an auto_map beside a known type", known, TRAIN, "auto_map", refused=False)
    yield Artifact("an adapter beside the weights", _beside, TRAIN, "adapter_config.json")
    yield Artifact("config with hidden_act", partial(_code, hidden_act="os.system"), TRAIN, "config")
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    yield Artifact("a deep config", partial(_config, data=deep), TRAIN, "config.json")
    for data in (b"[]", b"\x80\x04"):
        yield Artifact(f"a config of {data!r}", partial(_config, data=data), TRAIN, "config")


def _beside(place: Place) -> None:
    """An adapter in the base model's directory, with weights that are a pickle."""
    (place.model / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "../evil"}')
    torch_bomb(place.model / "adapter_model.bin", place)


def _only_bin(place: Place) -> None:
    (place.model / "model.safetensors").unlink()
    torch_bomb(place.model / "pytorch_model.bin", place)


def _config(place: Place, data: bytes) -> None:
    overwrite(place.model / "config.json", data)


def _in_tokenizers() -> Iterator[Artifact]:
    yield Artifact("a tokenizer that is a pickle", _pickled_tokenizer, TRAIN, "tokenizer.json")
    yield Artifact("a tokenizer.model that is a pickle", _sentencepiece, TRAIN, "tokenizer")
    for name, template in {**ESCAPES, **EXPLOSIONS}.items():
        yield Artifact(f"template: {name}", partial(_own_tokenizer, template=template), TRAIN, "template")
    yield Artifact("tokenizer class of a module", _classed_tokenizer, TRAIN, "tokenizer")


def _pickled_tokenizer(place: Place) -> None:
    _own_tokenizer(place)
    overwrite(place.inputs / "tokenizer" / "tokenizer.json", bomb(place))


def _sentencepiece(place: Place) -> None:
    _own_tokenizer(place, tokenizer_class="LlamaTokenizer")
    (place.inputs / "tokenizer" / "tokenizer.json").unlink()
    overwrite(place.inputs / "tokenizer" / "tokenizer.model", bomb(place))


def _classed_tokenizer(place: Place) -> None:
    auto = {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}
    _own_tokenizer(place, tokenizer_class="tokenization_evil.Evil", auto_map=auto)
    (place.inputs / "tokenizer" / "tokenizer.json").unlink()


def _in_data() -> Iterator[Artifact]:
    yield Artifact("pickled rows", lambda p: overwrite(p.inputs / "rows.jsonl", bomb(p)), TRAIN, "rows.jsonl")
    yield Artifact("a recipe with tags", _tagged, TRAIN, "r.yaml")
    for name in ("../../outside", "/outside-of-tuner"):
        yield Artifact(f"a run named {name}", lambda p: None, (*TRAIN[:3], name), "name")


def _tagged(place: Place) -> None:
    tags = f"!!python/object/apply:os.system [\"touch '{place.canary}'\"]"
    (place.inputs / "r.yaml").write_text(f"model: {tags}\n")
