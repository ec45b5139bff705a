"""Faults planted in the code that writes exports: each makes a wrong model of a run, and must end with exit code 6.

Each patches the product's own functions while an export is written: what merges an adapter, what lists the tensors of
an export, what writes its files or its config. `hold_back` exports a run with one of them and says how that ended.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tuner.api.exports import export_hf
from tuner.errors import VerificationError
from tuner.export import form, outputs
from tuner.export.outputs import ExportedValues
from tuner.export.tensors import Output, TensorSource, made_tensor
from tuner.export.write import write_config
from tuner.model.low_rank import LowRank

Outputs = list[Output]
NORM = "model.norm.weight"
_MERGED = ExportedValues.merged
Planted = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """What is wrong with an export, and which runs can have it: of an adapter, of DoRA, or all."""

    name: str
    plant: Planted
    of: str = "adapter"


@contextmanager
def in_outputs(change: Callable[[ExportedValues, Outputs], Outputs]) -> Iterator[None]:
    """Change what the writer is to write."""
    right = ExportedValues.merged
    with mock.patch.object(ExportedValues, "merged", lambda self, dtype: change(self, right(self, dtype))):
        yield


@contextmanager
def in_merges(change: Callable[[LowRank, torch.Tensor, int], torch.Tensor]) -> Iterator[None]:
    """Change what the merge of one weight's rows gives."""
    with mock.patch.object(LowRank, "added_to", lambda self, rows, start=0: change(self, rows, start)):
        yield


@contextmanager
def in_adapters(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Change which adapter belongs to which weight."""
    right = ExportedValues._low_rank
    with mock.patch.object(ExportedValues, "_low_rank", lambda self: change(dict(right(self)))):
        yield


def in_facts(**facts: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Change a fact of every adapter that is merged."""

    def wrong(**given: Any) -> LowRank:
        return LowRank(**given | {name: change(given[name]) for name, change in facts.items()})

    return mock.patch.object(outputs, "LowRank", wrong)


def remade(source: TensorSource, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorSource:
    """A tensor with other values."""
    return made_tensor(source.shape, source.dtype, lambda: change(source.whole().clone()))


def in_tensor(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Planted:
    """Change the first written tensor whose name ends so."""

    def changed(values: ExportedValues, found: Outputs) -> Outputs:
        at = next(number for number, output in enumerate(found) if output.name.endswith(ending))
        return [*found[:at], replace(found[at], source=remade(found[at].source, change)), *found[at + 1 :]]

    return lambda: in_outputs(changed)


def transposed(self: LowRank, rows: torch.Tensor, start: int) -> torch.Tensor:
    """W + s·(B·A)ᵀ wherever that fits."""
    product = self.b @ self.a
    product = product.T if product.shape[0] == product.shape[1] else product
    return rows.float() + product[start : start + len(rows)] * self.scale


def rounded_before(self: LowRank, rows: torch.Tensor, start: int) -> torch.Tensor:
    """W + bf16(s·B·A): the sum of two rounded terms."""
    added = (self.b[start : start + len(rows)] @ self.a) * self.scale
    return rows.float() + added.bfloat16().float()


def subtracted(self: LowRank, rows: torch.Tensor, start: int) -> torch.Tensor:
    """W - s·B·A."""
    return rows.float() - (self.b[start : start + len(rows)] @ self.a) * self.scale


def rounded_twice(values: ExportedValues, found: Outputs) -> Outputs:
    """Every tensor by way of float16, or of bf16 where float32 is written."""

    def way(output: Output) -> torch.dtype:
        return torch.bfloat16 if output.dtype == torch.float32 else torch.float16

    def again(output: Output) -> TensorSource:
        return remade(output.source, lambda tensor: tensor.to(way(output)).to(tensor.dtype))

    return [replace(output, source=again(output)) for output in found]


def untied(values: ExportedValues, found: Outputs) -> Outputs:
    """A head of its own, a hundredth larger than the embeddings."""
    embeddings = next(each for each in found if each.name.endswith("embed_tokens.weight"))
    head = remade(embeddings.source, lambda tensor: tensor * 1.01)
    return [*found, replace(embeddings, name="lm_head.weight", source=head)]


@contextmanager
def untied_head() -> Iterator[None]:
    """The head and the config that says so."""

    def wrong(directory: Path, config: Any, *rest: Any) -> None:
        config.tie_word_embeddings = False
        write_config(directory, config, *rest)

    with mock.patch.object(form, "write_config", wrong), in_outputs(untied):
        yield


def stale(values: ExportedValues, found: Outputs) -> Outputs:
    """The last third of the tensors, a shard of them, as they were before training."""
    with mock.patch.object(ExportedValues, "_low_rank", lambda self: {}):
        before = _MERGED(values, found[0].dtype)
    first = len(found) * 2 // 3
    return [*found[:first], *before[first:]]


def without_first(found: dict[str, Any]) -> dict[str, Any]:
    """All adapters but one."""
    return dict(list(found.items())[1:])


def swapped(found: dict[str, Any]) -> dict[str, Any]:
    """The adapters of one kind of layer in the first two blocks, each in the other's place."""
    first, second = [name for name in found if name.endswith("q_proj.weight")][:2]
    return found | {first: found[second], second: found[first]}


def heads_apart(weight: torch.Tensor) -> torch.Tensor:
    """Rows of queries in the order that interleaved rotary positions want."""
    half = len(weight) // 2
    return weight.reshape(2, half, -1).transpose(0, 1).reshape(weight.shape)


def next_number(tensor: torch.Tensor) -> torch.Tensor:
    """One number in the last place of bf16 away."""
    flat = tensor.reshape(-1)
    at = int(flat.abs().argmax())
    flat[at] = flat[at] * (1 + 2**-7)
    return tensor


FAULTS: Sequence[Fault] = (
    Fault("a transposed merge", lambda: in_merges(transposed)),
    Fault("a missing scale", lambda: in_facts(scale=lambda scale: 1.0)),
    Fault("another alpha", lambda: in_facts(scale=lambda scale: scale * 1.02)),
    Fault("the adapter subtracted", lambda: in_merges(subtracted)),
    Fault("the adapter rounded before the sum", lambda: in_merges(rounded_before)),
    Fault("an adapter left out", lambda: in_adapters(without_first)),
    Fault("two layers swapped", lambda: in_adapters(swapped)),
    Fault("a stale shard", lambda: in_outputs(stale)),
    Fault("rounded twice", lambda: in_outputs(rounded_twice), "all"),
    Fault("an untied head", untied_head, "all"),
    Fault("a norm not exported", lambda: in_outputs(lambda _, found: [e for e in found if e.name != NORM]), "all"),
    Fault("queries permuted", in_tensor("q_proj.weight", heads_apart), "all"),
    Fault("embeddings shifted by a row", in_tensor("embed_tokens.weight", lambda one: one.roll(1, 0)), "all"),
    Fault("one number of the base", in_tensor("1.mlp.up_proj.weight", next_number), "all"),
    Fault("DoRA's lengths dropped", lambda: in_facts(length=lambda length: None), "dora"),
    Fault("DoRA's lengths of other rows", lambda: in_facts(length=lambda length: length.roll(1)), "dora"),
)  # fmt: skip


def hold_back(run: Path, fault: Fault, output: Path, **how: Any) -> str:
    """Export a run with a fault; empty where it ended with 6 and left nothing, else what came of it instead."""
    with fault.plant():
        try:
            report = export_hf(run, output, **how)
        except VerificationError as error:
            left = [path.name for path in output.parent.glob(f"*{output.name}*")]
            return "" if error.exit_code == 6 and not left else f"left {left}: {error.message}"  # noqa: PLR2004
    return f"published as {report.dtype}, {report.kept} kept"
