"""What the directory of an export holds of the model that was trained: itself, or a whole that it is a part of.

In a whole multimodal checkpoint the trained tensors lie in their files' own places. All else is copied from the files
that training started from, a block at a time, and held against their hashes.
"""

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from tuner.errors import DataError, RecipeError
from tuner.export.outputs import ExportedValues, Trained
from tuner.export.source import ExportSource
from tuner.export.tensors import OpenFiles, Output
from tuner.export.verify import not_published
from tuner.export.weights import published_tensors, read_config, some
from tuner.export.write import CONFIG, write_config
from tuner.model import stored
from tuner.model.build import decoder_of, head_layer, meta_model
from tuner.model.multimodal import text_key, untouched
from tuner.model.stored import WEIGHTS, elements, hashes, published, state_names, stored_tensors
from tuner.model.transformers_private import file_places
from tuner.runtime.files import json_bytes, read_json, write_new

PROCESSORS = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
)
"""Files of what makes inputs of images and sound."""
TEMPLATE = "chat_template.json"
"""Where older processors keep the chat template."""


class Form:
    """How the directory of an export lays out a trained model for its readers: here as it was trained, by itself."""

    elements: int = 0
    """How many numbers there are besides the trained model's."""

    def __init__(self, trained: Trained, config: PretrainedConfig) -> None:
        """``config`` is that of the model that is loaded from the directory; what is changed in it is written."""
        self._plain, self.config = trained.plain, config

    def require_same(self) -> None:
        """Check what comes from elsewhere than the checkpoint and its base: nothing. Raises DataError."""

    def outputs(self, values: ExportedValues, dtype: torch.dtype, files: OpenFiles) -> list[Output]:
        """Every tensor that is written. Raises DataError and RecipeError."""
        return values.merged(dtype)

    def write_config(self, directory: Path, dtype: torch.dtype) -> None:
        """Write config.json and what belongs to it."""
        write_config(directory, self.config, type(self._plain).__name__, dtype)

    def require_written(self, directory: Path) -> None:
        """Check what was copied: nothing. Raises VerificationError."""

    def name(self, name: str) -> str:
        """What a tensor of the trained model is called in the model that is loaded from the directory."""
        return name


class WholeModel(Form):
    """The files of the checkpoint that a run started from, with what of them it left as it was."""

    def __init__(self, source: ExportSource, trained: Trained) -> None:
        """Find them and read their headers. Raises DataError where they are absent or damaged."""
        super().__init__(trained, read_config(source))
        self._source = source
        patterns = [*WEIGHTS, CONFIG, *PROCESSORS, TEMPLATE]
        self.directory = stored.weights_directory(source.name_or_path, source.revision, patterns)
        self._untouched = untouched(trained.plain, self.directory)
        self.elements = elements(self._untouched.values())  # numbers that were left as they were

    @cached_property
    def _lines(self) -> dict[str, str]:
        return hashes(self._untouched)

    def require_same(self) -> None:
        """Hash what was left as it was. Raises DataError where it is not what the run's checkpoint noted."""
        noted = self._source.model.get("untouched") or {}
        if stored.hash_of_all(self._lines) != noted.get("sha256"):
            raise DataError(
                f"{self.directory}: what {self._source.checkpoint.path} left as it was of it (images, sound) changed "
                f"since: {len(self._lines)} tensors, {noted.get('tensors')} then",
                hint="restore it, or name its commit: model.revision",
            )

    def outputs(self, values: ExportedValues, dtype: torch.dtype, files: OpenFiles) -> list[Output]:
        """All tensors of the checkpoint in its files' order: trained ones in the place of theirs, others as they are.

        Each is read once: what the files hold twice has two sources. Raises DataError where the files have no place for
        a trained one.
        """
        found = published_tensors(files, str(self.directory), None)
        places, tied = file_places(self._plain, found), self._tied()
        made, again = (self._by_place(values.merged(dtype)) for _ in range(2))
        placed, outputs = set[str](), list[Output]()
        for name, tensor in found.items():
            if name in self._untouched:
                outputs.append(Output(name, tensor.dtype, tensor))
                continue
            place = tied.get(places[name].key, places[name].renamed)
            output = (again if place in placed else made)[place]
            placed.add(place)
            outputs.append(Output(name, output.dtype, output.source))
        if lost := made.keys() - placed:
            raise DataError(f"{self.directory}: its files have no place for {some(sorted(lost))}")
        return outputs

    def _by_place(self, outputs: Sequence[Output]) -> dict[str, Output]:
        places = file_places(self._plain, [output.name for output in outputs])
        return {places[output.name].renamed: output for output in outputs}

    def _tied(self) -> dict[str, str]:
        """Where the files hold the tensor that stands for another of the model, by the other's name in the model."""
        first = {id(tensor): name for name, tensor in state_names(self._plain).items()}
        targets = {entry.name: next(iter(entry.targets)) for entry in published(self._plain)}
        others = {
            name: targets[first[id(tensor)]] for name, tensor in self._plain.named_parameters(remove_duplicate=False)
            if first[id(tensor)] != name
        }
        places = file_places(self._plain, others.values())
        return {name: places[target].renamed for name, target in others.items()}

    def write_config(self, directory: Path, dtype: torch.dtype) -> None:
        """Write the checkpoint's own config.json, with what training changed in it, and the files of its processor."""
        facts, config = read_json(self.directory / CONFIG), self.config
        text: dict[str, Any] = facts.setdefault(text_key(config), {})
        changes = dict(self._source.model_section.get("config") or {})
        vocabulary = config.get_text_config().vocab_size
        if self._source.new_ids and text.get("vocab_size") != vocabulary:
            changes["vocab_size"] = vocabulary
        text.update(changes)
        for part in (facts, text):
            for key in ("dtype", "torch_dtype"):
                if key in part:
                    part[key] = str(dtype).removeprefix("torch.")
        kept = {key: value for key, value in facts.items() if key not in ("_name_or_path", "auto_map")}
        write_new(directory / CONFIG, json_bytes(kept))
        has_own = (self._source.recipe.get("tokenizer") or {}).get("chat_template")
        for name in PROCESSORS if has_own else (*PROCESSORS, TEMPLATE):
            if (self.directory / name).is_file() and not (directory / name).exists():
                shutil.copyfile(self.directory / name, directory / name)

    def require_written(self, directory: Path) -> None:
        """Hash what was copied. Raises VerificationError naming a tensor whose bytes, type or shape are others."""
        stored = stored_tensors(directory)
        there = hashes({name: stored[name] for name in self._lines if name in stored})
        for name, line in self._lines.items():
            if there.get(name) != line:
                raise not_published(f"{name} was not trained, and differs from that of {self.directory}")


class LanguageModelAlone(Form):
    """The language model of a multimodal checkpoint as a model of its own."""

    def __init__(self, source: ExportSource, trained: Trained) -> None:
        """Find its class. Raises RecipeError where transformers has none that fits."""
        super().__init__(trained, read_config(source).get_text_config())
        plain = trained.plain
        kind = plain.config.model_type

        def refused(why: str) -> RecipeError:
            return RecipeError(f"--text-only: {why}", hint="export the whole checkpoint: leave out --text-only")

        if type(self.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise refused(f"transformers has no class for the language model of {kind} alone")
        self._model = meta_model(self.config, torch.float32)
        self._names = dict(zip(_by_role(plain), _by_role(self._model), strict=True))
        wanted = {self.name(name): tensor.shape for name, tensor in state_names(plain).items()}
        if wanted != {name: tensor.shape for name, tensor in state_names(self._model).items()}:
            raise refused(f"{type(self._model).__name__} has other tensors than the language model of {kind}")
        self._own = {name: self.name(name) for name in state_names(plain)}

    def outputs(self, values: ExportedValues, dtype: torch.dtype, files: OpenFiles) -> list[Output]:
        """Every published tensor of the language model."""
        return values.alone(self._model, self._own, dtype)

    def write_config(self, directory: Path, dtype: torch.dtype) -> None:
        """Write the language model's config.json."""
        write_config(directory, self.config, type(self._model).__name__, dtype)

    def name(self, name: str) -> str:
        """The tensor's name without the whole model around it."""
        for part, alone in self._names.items():
            if name.startswith(f"{part}."):
                return alone + name.removeprefix(part)
        return name


def _by_role(model: PreTrainedModel) -> list[str]:
    """Names of the decoder and of the output layer."""
    names = {module: name for name, module in model.named_modules()}
    return [names[decoder_of(model)], names[head_layer(model)]]
