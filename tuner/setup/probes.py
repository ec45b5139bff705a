"""Logits of the trained model on stored inputs, recorded with a checkpoint so that an export can be verified."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tuner.config.methods import head_of
from tuner.config.recipe import Recipe
from tuner.data.prepared import PackedRows, PreparedData
from tuner.model.root import CausalLM
from tuner.setup.resolve import Resolved

MAX_PROBES = 20
MAX_TOKENS = 64
_PRODUCTS = {
    functional.linear, functional.embedding, functional.layer_norm, torch.addmm, torch.bmm, torch.matmul,
    torch.Tensor.matmul, torch.Tensor.__matmul__,
}


class _Float32Products(TorchFunctionMode):
    """Computes products with float32 copies of bfloat16 weights, so that a frozen bfloat16 base adds no rounding.

    What a module casts to the type of its bfloat16 weights (Gemma's scale of the embeddings) stays as it is.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.to and len(args) == 2 and args[1] is torch.bfloat16:
            return args[0]
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            args = tuple(_widened(value) for value in args)
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def probe_inputs(rows: PackedRows, from_end: bool = False) -> list[torch.Tensor]:
    """The first tokens of the first documents of the training rows: at most 20 tensors int64 of at most 64 tokens.

    With ``from_end`` the last ones: a score is that of a document's last token.
    """
    part = slice(-MAX_TOKENS, None) if from_end else slice(MAX_TOKENS)
    probes: list[torch.Tensor] = []
    for index in range(min(len(rows), MAX_PROBES)):
        row = rows.row(index)
        documents = torch.as_tensor(row.input_ids).split(row.lengths.tolist())
        probes += [document[part].clone() for document in documents if len(document) > 1]
        if len(probes) >= MAX_PROBES:
            break
    return probes[:MAX_PROBES]


@torch.no_grad()
def record_probes(root: CausalLM, probes: list[torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Float32 logits at the last position of each probe, as documents of one row where those are apart. Collective.

    Where processes gather the weights of each layer, they do so once and not for every probe.

    Returns input_ids int64 ``[P, L]`` padded with zeros, lengths int64 ``[P]`` and logits float32 ``[P, V]``; of a
    reward model its scores ``[P, 1]``.
    """
    root.eval()
    lengths = torch.tensor([len(p) for p in probes])
    with _whole(root), _in_float32(root):
        # Side by side they would be filled up, and round otherwise than alone; or, where the class attends its own way,
        # be one text, which may be longer than its positions go.
        is_one_row = root.layout.route == "flat" and root.layout.takes_documents
        rows = [probes] if is_one_row else [[probe] for probe in probes]
        logits = torch.cat([_last_logits(root, row, device) for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence(probes, batch_first=True)
    return {"input_ids": padded, "lengths": lengths, "logits": logits.float().cpu()}


def _in_float32(root: CausalLM) -> AbstractContextManager[object]:
    """Within, products are in float32; a model all of whose weights are needs no look at each operation."""
    tensors = [*root.parameters(), *root.buffers()]
    return _Float32Products() if any(tensor.dtype == torch.bfloat16 for tensor in tensors) else nullcontext()


def _whole(root: CausalLM) -> AbstractContextManager[None]:
    """Within, the weights are as they are trained, where processes gather them in another type."""
    if not torch.distributed.is_initialized():
        return nullcontext()
    from tuner.parallel.fsdp import as_trained

    return as_trained(root)


def _last_logits(root: CausalLM, documents: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Logits ``[len(documents), V]`` of the last tokens of a row's documents."""
    lengths = tuple(map(len, documents))
    places = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.tensor(lengths).cumsum(0) - 1
    return root.logits(torch.cat(documents).to(device), places.to(device), lengths, ends.to(device))


def probes_of(resolved: Resolved, rows: PackedRows) -> list[torch.Tensor]:
    """The beginnings of rows, int64 each, whose logits checkpoints record: of a score, the ends."""
    return probe_inputs(rows, from_end=head_of(resolved.recipe.method) == "score")


def probed_rows(recipe: Recipe, prepared: PreparedData) -> PackedRows:
    """Rows whose beginnings a checkpoint records logits of. Bases to merge into are compared on held-out ones."""
    is_compared = recipe.model.quantize != "none"
    return prepared.eval if is_compared and prepared.eval is not None else prepared.train
