"""A model of transformers as llama.cpp computes it: keys, names and layouts, by a table of families.

On a CPU it reads GELU off a table of float16 (ggml-cpu/vec.h: ggml_vec_geglu_f32).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import gguf
import torch
from torch.nn import functional
from transformers import PretrainedConfig

from tuner.errors import RecipeError
from tuner.export.gguf.tables import table
from tuner.export.tensors import TensorSource, converted_tensors, held_tensor, made_tensor, mapped_tensor
from tuner.model import transformers_private as here

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_SUFFIXES = (".weight", ".bias")
_OF_YARN = {"attention_factor": None, "mscale": None, "mscale_all_dim": None, "beta_fast": 32, "beta_slow": 1}
"""What llama.cpp takes where a file says nothing."""


@dataclass(frozen=True)
class Architecture:
    """What the table and a config say of one model. Raises RecipeError where llama.cpp computes something else."""

    row: Mapping[str, Any]
    config: PretrainedConfig
    facts: Mapping[str, Any]
    """The config's values, with those that it leaves to be computed."""

    @staticmethod
    def of(config: PretrainedConfig) -> Architecture:
        """The row of a config."""
        families = table("architectures")["families"]
        if config.model_type not in families:
            raise RecipeError(
                f"{config.model_type}: no GGUF of this architecture is proven",
                hint=f"there are: {', '.join(families)}; others: docs/how-to/serve.md",
            )
        facts = {**config.to_dict(), **_computed(config)}
        architecture = Architecture(families[config.model_type], config, facts)
        for key, wanted in {**table("architectures")["common"]["expect"], **architecture.row.get("expect", {})}.items():
            expected = facts[wanted[1:]] if isinstance(wanted, str) and wanted.startswith("=") else wanted
            if (found := architecture.fact(key)) != expected:
                raise RecipeError(
                    f"{config.model_type} with {key}: {found}: llama.cpp computes it with {expected} alone",
                    hint="serve the Hugging Face directory instead: docs/how-to/serve.md",
                )
        return architecture

    def fact(self, key: str) -> Any:
        """A value of the config; None where it has none."""
        return self.facts[key] if key in self.facts else getattr(self.config, key, None)

    @property
    def name(self) -> str:
        """What llama.cpp calls it."""
        return str(self.row["architecture"])

    def computed(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model, which reads its activation off a table of float16 from now on where llama.cpp does."""
        return read_off_a_table(model) if self.row.get("table") else model

    @property
    def context(self) -> int:
        """Tokens up to which llama.cpp computes what transformers does: all of them, or one window."""
        window = None if self.row.get("window") == "key" else self.facts.get("sliding_window")
        return min(int(window or self.facts["max_position_embeddings"]), int(self.facts["max_position_embeddings"]))

    def keys(self, published: Mapping[str, TensorSource]) -> dict[str, Any]:
        """The hyper-parameters of the file, by their keys in it."""
        found: dict[str, Any] = {}
        for kind, of in (("integers", int), ("numbers", float)):
            for key, source in {**table("architectures")["common"][kind], **self.row.get(kind, {})}.items():
                if (value := self.fact(source)) is not None:
                    found[key] = of(value)
        for key, name in self.row.get("sized_by", {}).items():
            found[key] = published[f"model.layers.0.{name}"].shape[0]
        for key in self.row.get("of_attention", ()):
            found[key] = [found[key] if kind == "full_attention" else 0 for kind in self.facts["layer_types"]]
        found |= self._window() | self._rope()
        return {f"{self.name}.{key}": value for key, value in found.items()}

    def _window(self) -> dict[str, Any]:
        if not (window := self.facts.get("sliding_window")):
            return {}
        is_key = self.row.get("window") == "key"
        return {"attention.sliding_window": int(window)} if is_key else {"context_length": self.context}

    def _rope(self) -> dict[str, Any]:
        rope = self.facts["rope"]
        kind, factor = rope.get("rope_type", "default"), rope.get("factor")
        if kind in ("default", "llama3"):  # Llama 3's is a tensor
            return {}
        if kind == "linear":
            return {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
        others = {key: value for key, value in rope.items() if key in _OF_YARN and value not in (None, _OF_YARN[key])}
        if kind != "yarn" or others:
            raise RecipeError(f"rope_parameters of {kind} {others or ''}: no GGUF of these positions is proven")
        return {
            "rope.scaling.type": "yarn", "rope.scaling.factor": float(factor),
            "rope.scaling.original_context_length": int(rope["original_max_position_embeddings"]),
        }

    def tensors(self, published: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """Every tensor of the file by its name there, last dimension first to vary.

        Raises RecipeError for one that has no place in llama.cpp's model.
        """
        placed: dict[str, TensorSource] = {}
        for name, source in _stacked(published).items():
            if name != "lm_head.weight" or not self.facts.get("tie_word_embeddings"):
                placed |= self.placed(name, source)
        if self.facts["rope"].get("rope_type") == "llama3":
            placed["rope_freqs.weight"] = held_tensor(_factors(self.facts["rope"], self.facts["rotary_dim"]))
        return placed

    def placed(self, name: str, source: TensorSource) -> dict[str, TensorSource]:
        """One published tensor, or B of its adapter, by its name in the file, or by those of its parts.

        Raises RecipeError where it has no place in llama.cpp's model.
        """
        if (parts := self._columns(name, source)) is not None:
            return parts
        if (target := self._names.get_name(name, try_suffixes=_SUFFIXES)) is None:
            raise RecipeError(f"{name}: has no place in llama.cpp's {self.name}: the model cannot be written")
        return {target if target.endswith(_SUFFIXES) else f"{target}.weight": self._laid_out(name, source)}

    @cached_property
    def _names(self) -> Any:
        return gguf.get_tensor_name_map(_ARCHITECTURES[self.name], int(self.facts["num_hidden_layers"]))

    def _columns(self, name: str, source: TensorSource) -> dict[str, TensorSource] | None:
        """What the columns of one tensor of experts are in the file; None for another tensor."""
        match = _LAYER.fullmatch(name)
        targets = self.row.get("columns", {}).get(match[2]) if match else None
        if match is None or targets is None:
            return None
        named = [f"blk.{match[1]}.{target}" for target in targets]
        convert, unread = partial(_columns, named), torch.empty(source.shape, device="meta")
        return converted_tensors(source, convert, {key: tuple(t.shape) for key, t in convert(unread).items()})

    def _laid_out(self, name: str, source: TensorSource) -> TensorSource:
        layer = name.split(".")[-2]
        if layer in self.row.get("interleaved", ()):
            size = int(self.facts["head_dim"])
            return made_tensor(source.shape, source.dtype, lambda: _interleaved(source.whole(), size))
        if self.row.get("norm_offset") and name.endswith("norm.weight"):
            return mapped_tensor(source, torch.float32, lambda block: block.float() + 1)
        if layer in self.row.get("flat", ()):
            shape = tuple(size for size in source.shape if size != 1)
            return mapped_tensor(source, source.dtype, lambda block: block.reshape(-1, *shape[1:]), shape)
        return source


_ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def _computed(config: PretrainedConfig) -> dict[str, Any]:
    facts: Any = config
    rope = dict(getattr(facts, "rope_parameters", None) or {})
    rope = rope.get("full_attention", rope)
    head_dim = getattr(facts, "head_dim", None) or facts.hidden_size // facts.num_attention_heads
    return {
        "head_dim": head_dim, "rotary_dim": int(head_dim * float(rope.get("partial_rotary_factor", 1.0))), "rope": rope,
        "rope_theta": rope.get("rope_theta"),
        "hidden_act": getattr(facts, "hidden_act", None) or getattr(facts, "hidden_activation", None),
    }


def _stacked(published: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors, with those of a layer's experts in one ``[E, ...]``."""
    found: dict[str, TensorSource] = {}
    experts: dict[str, dict[int, TensorSource]] = {}
    for name, source in published.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = source
        else:
            found[name] = source
    for name, each in experts.items():
        found[name] = _stack([each[number] for number in sorted(each)])
    return found


def _stack(sources: list[TensorSource]) -> TensorSource:
    first = sources[0]
    return TensorSource(
        (len(sources), *first.shape), first.dtype,
        lambda start, stop: torch.stack([source.whole() for source in sources[start:stop]]),
    )


def _columns(names: list[str], tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every n-th column from the first on, from the second on, ...; weights ``[E, in, out]`` as ``[E, out, in]``."""
    parts = {name: tensor[..., first :: len(names)] for first, name in enumerate(names)}
    return {name: part.transpose(1, 2) if part.ndim == 3 else part for name, part in parts.items()}  # noqa: PLR2004


def _interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows ``[H * D, ...]`` of heads whose halves rotate together, as pairs of neighbours."""
    heads = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return heads.transpose(1, 2).reshape(weight.shape)


def _factors(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """By what llama.cpp divides each frequency ``[D / 2]`` for the positions of Llama 3.

    Slow ones are divided by the factor, fast ones by one, those in between by a mean of both (Llama 3.1's model.py).
    """
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    share = ((turns - low) / (high - low)).clamp(0, 1)
    factors: torch.Tensor = 1 / ((1 - share) / float(rope["factor"]) + share)
    return factors.float()


_END = 10.0
"""Beyond it GELU is its input, or 0, and no table is read."""
_NOISE = 2e-6
"""Of the inputs' root mean square: how far two programs that add in float32 are apart after some layers."""


class TableGelu(torch.nn.Module):
    """The tanh approximation at the input rounded to float16, rounded to float16; float32 in and out."""

    draw: torch.Generator | None = None
    """What moves inputs by float32's rounding, so that some are read one step of the table away."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What ggml gives for ``x`` of any shape."""
        if self.draw is not None:
            signs = torch.randint(0, 2, x.shape, generator=self.draw) * 2 - 1
            x = x + signs * (_NOISE * x.square().mean().sqrt())
        read = functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x.abs() < _END, read, x.clamp(min=0))


def read_off_a_table(model: torch.nn.Module) -> torch.nn.Module:
    """The model with every GELU as ggml's."""
    found = [
        (parent, name) for parent in model.modules() for name, child in parent.named_children()
        if isinstance(child, here.GELUTanh)
    ]  # fmt: skip
    assert found, "the table of families says that it has GELU"
    for parent, name in found:
        setattr(parent, name, TableGelu())
    return model


@contextmanager
def other_steps(model: torch.nn.Module) -> Iterator[bool]:
    """Inside it, inputs that float32's rounding leaves undecided between two steps of the table may take the other one.

    Gives whether the model reads a table at all.
    """
    tables = [module for module in model.modules() if isinstance(module, TableGelu)]
    draw = torch.Generator().manual_seed(0)
    for module in tables:
        module.draw = draw
    try:
        yield bool(tables)
    finally:
        for module in tables:
            module.draw = None
