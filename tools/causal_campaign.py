"""Train every causal type that transformers knows for one step, and hold it to the model that transformers alone loads.

    python tools/causal_campaign.py [--only llama bloom] [--out figures.json] [--table table.md]

For each type a tiny model is saved with random weights. The reference is `from_pretrained` of that directory, without
tuner's attention: each document alone, plain cross-entropy over all trained tokens, divided by their count. Then the
model is built as `tuner train` builds it, and forward and backward of the first step are computed in three ways:
``packed`` (three documents in one row), ``single`` (`data.packing: false`, a document to a micro-batch) and
``several`` (the same, three rows to a micro-batch). A type that is trained packed, or else single, is trained so with
a LoRA adapter too (``lora``): its loss is the plain model's, and its gradients follow from those of the plain weights.
Each is ``equal`` (loss, all gradients together and each tensor within 1e-5, and a later token moves no earlier logit)
or ``refused``, with the reason that `tuner train` ends with.
What no type may be is ``wrong`` or ``crashed``; then the exit code is 1. A type whose class cannot be built, or cannot
run on a row of token ids, in transformers alone is shown with that reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PretrainedConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.causal_cases import DECODERS, TYPES, VOCAB, tiny_config  # noqa: E402
from tuner.config.load import load_recipe  # noqa: E402
from tuner.data.batches import StepBatches, collate  # noqa: E402
from tuner.data.prepared import Row  # noqa: E402
from tuner.errors import RecipeError, TunerError  # noqa: E402
from tuner.model.adapter import lora_layers  # noqa: E402
from tuner.model.attention import withdrawn  # noqa: E402
from tuner.model.flops import training_flops  # noqa: E402
from tuner.parallel.mesh import Mesh  # noqa: E402
from tuner.run.begin import write_model_config
from tuner.runtime.dist import RankInfo  # noqa: E402
from tuner.setup.build import assemble_model, build_train_state  # noqa: E402
from tuner.setup.resolve import resolve  # noqa: E402
from tuner.train.step import TrainState, forward_backward  # noqa: E402

ALLOWED = 1e-5
MOVED_ALLOWED = 1e-6
LENGTHS = (5, 21, 12)  # longer than the windows of the tiny configs, and shorter
MODES = {
    "packed": {"data.packing": "auto", "train.micro_batch_size": 1},
    "single": {"data.packing": False, "train.micro_batch_size": 1},
    "several": {"data.packing": False, "train.micro_batch_size": 3},
}
LORA = "lora"
ADAPTER = {"adapter.kind": "lora", "adapter.r": 4, "adapter.alpha": 8}


@dataclass
class Outcome:
    """Of one type in one mode: equal, refused, wrong or crashed, and the relative differences found."""

    verdict: str
    reason: str = ""
    loss: float | None = None
    gradients: float | None = None
    worst: float | None = None
    """Of the gradient of one tensor; one of less than a hundredth of the whole is held to that hundredth."""
    moved: float | None = None


@dataclass
class Finding:
    """Of one type: why transformers itself cannot run it, or what became of each mode."""

    type: str
    impossible: str = ""
    modes: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Reference:
    """Loss and gradients by name of the plainly loaded model.

    ``draws`` where it draws random numbers in training whatever its config says: both are in evaluation mode then.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    draws: bool


def documents() -> list[np.ndarray]:
    """Ids that are no special tokens."""
    generator = np.random.default_rng(5)
    return [generator.integers(3, VOCAB, length, dtype=np.int64) for length in LENGTHS]


def write_random(config: PretrainedConfig, directory: Path) -> None:
    """A model of the config with weights large enough for attention to matter, as transformers saves it."""
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and parameter.is_floating_point() and "conv" not in name:
                parameter.copy_(torch.randn(parameter.shape) * min(0.2, parameter.shape[1] ** -0.5))
        for ids in documents():
            logits = model(input_ids=torch.tensor(ids)[None], use_cache=False).logits
            if logits.shape != (1, len(ids), logits.shape[-1]) or not logits.isfinite().all():
                raise ValueError(f"logits {list(logits.shape)} of {len(ids)} tokens, or not finite")
    model.save_pretrained(directory)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)  # as it was given: a part of it may be what the model keeps


def plain_step(directory: Path) -> Reference:
    """The first step by transformers alone, each document by itself."""
    with withdrawn():
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model.train()
        row = torch.tensor(documents()[0])[None]
        once, again = (model(input_ids=row, use_cache=False).logits for _ in range(2))
        if draws := not torch.equal(once, again):
            model.eval()
        count = sum(length - 1 for length in LENGTHS)
        total = 0.0
        for ids in documents():
            row = torch.tensor(ids)
            logits = model(input_ids=row[None], use_cache=False).logits[0]
            loss = cross_entropy(logits[:-1].double(), row[1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
    return Reference(total, gradients_of(model), draws)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of all parameters that got one, tied ones once."""
    return {name: p.grad.detach().double() for name, p in model.named_parameters() if p.grad is not None}


def adapter_gradients(model: nn.Module, plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A new adapter's gradients, by those of the plain model's weights W: s dW A^T for B; 0 for A, since B is 0."""
    found = {}
    for name, layer in lora_layers(model):
        down, up = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
        weight = plain.get(f"{name}.weight")
        if weight is not None:
            weight = weight.T if layer.fan_in_fan_out else weight
            up = layer.scaling["default"] * weight @ down.T
        found |= {f"{name}.lora_A.default.weight": torch.zeros_like(down), f"{name}.lora_B.default.weight": up}
    return found


def our_step(directory: Path, mode: str, draws: bool, with_lora: bool = False) -> tuple[TrainState, float]:
    """Build the model as `tuner train` does; loss and gradients of the first step are in the learner afterwards."""
    given = {
        "model.name_or_path": str(directory), "tokenizer.name_or_path": "byte", "data.train": [{"path": "rows.jsonl"}],
        "data.max_length": 64, "train.precision": "fp32", "train.device": "cpu", "train.duration": "1 steps",
        "train.global_batch_size": 3, "optimizer.lr": 1e-3, "output_dir": str(directory / "run"), **MODES[mode],
        **(ADAPTER if with_lora else {}),
    }  # fmt: skip
    recipe = load_recipe(_tree(given)).recipe
    resolved = resolve(recipe, 64, RankInfo())
    train_state = build_train_state(resolved.recipe, *assemble_model(resolved, RankInfo(), Mesh()))
    write_model_config(directory / mode, resolved)
    training_flops(train_state.root.model)
    if draws:
        train_state.root.train = lambda mode=True: train_state.root  # type: ignore[method-assign] # it stays in evaluation mode
    rows = [
        Row(ids, np.ones(len(ids), bool), np.array([len(ids)], np.int32), np.array([number], np.int64))
        for number, ids in enumerate(documents())
    ]
    micro = [collate([row]) for row in rows] if mode == "single" else [collate(rows)]
    count = sum(len(batch.trained_positions) for batch in micro)
    sums, counts = forward_backward(train_state, 0, StepBatches(np.arange(3), count, sum(LENGTHS), micro))
    return train_state, float(sums.loss(counts))


@torch.no_grad()
def moved_by_later(train_state: TrainState, mode: str) -> float:
    """How far a change of the later half of each document moves the logits before it, relative to their spread."""
    root = train_state.root.eval()
    ids = [torch.tensor(row) for row in documents()]
    worst = 0.0
    for chosen in [[i] for i in range(len(ids))] if mode == "single" else [range(len(ids))]:
        row = torch.cat([ids[i] for i in chosen])
        lengths = tuple(len(ids[i]) for i in chosen)
        positions = torch.cat([torch.arange(length) for length in lengths])
        before = root.logits(row, positions, lengths, torch.arange(len(row)))
        start = 0
        for length in lengths:
            changed, middle = row.clone(), start + length // 2
            changed[middle : start + length] = (changed[middle : start + length] - 3 + 1) % (VOCAB - 3) + 3
            after = root.logits(changed, positions, lengths, torch.arange(len(row)))
            outside = torch.ones(len(row), dtype=torch.bool)
            outside[middle : start + length] = False
            spread = (before - before.mean(-1, keepdim=True)).norm().clamp_min(1e-12)
            worst = max(worst, float((after - before)[outside].norm() / spread))
            start += length
    return worst


def compare(directory: Path, reference: Reference, mode: str, with_lora: bool = False) -> Outcome:
    """One mode of one type, in full or with an adapter."""
    try:
        train_state, loss = our_step(directory, mode, reference.draws, with_lora)
    except RecipeError as error:
        return Outcome("refused", error.message)
    except TunerError as error:
        return Outcome("crashed", f"{type(error).__name__}: {error.message}")
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises is a finding
        return Outcome("crashed", f"{type(error).__name__}: {str(error)[:200]}")
    found, wanted = gradients_of(train_state.root.model), reference.gradients
    if with_lora:
        wanted = adapter_gradients(train_state.root.model, wanted)
    names = sorted(wanted.keys() | found.keys())
    zero = torch.zeros(())
    whole = sum(float(g.norm()) ** 2 for g in wanted.values()) ** 0.5
    squares, worst = 0.0, 0.0
    for name in names:
        expected = wanted.get(name, zero)
        difference = float((found.get(name, zero) - expected).norm())
        squares += difference**2
        worst = max(worst, difference / max(float(expected.norm()), whole / 100))
    off, moved = abs(loss - reference.loss) / abs(reference.loss), moved_by_later(train_state, mode)
    right = all(figure <= ALLOWED for figure in (off, squares**0.5 / whole, worst)) and moved <= MOVED_ALLOWED
    return Outcome("equal" if right else "wrong", "", off, squares**0.5 / whole, worst, moved)


def examine(model_type: str, decoder: bool = False, with_lora: bool = True) -> Finding:
    """One type in every mode; with ``decoder`` an encoder as the decoder that its config can make of it."""
    finding, started = Finding(f"{model_type}, is_decoder" if decoder else model_type), time.perf_counter()
    with tempfile.TemporaryDirectory() as name, _quiet():
        directory = Path(name)
        try:
            config = tiny_config(model_type)
            if decoder:
                config.is_decoder = True
            write_random(config, directory)
            reference = plain_step(directory)
        except Exception as error:  # noqa: BLE001 - whatever transformers raises is the reason
            finding.impossible = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            for mode in MODES:
                finding.modes[mode] = compare(directory, reference, mode)
            if with_lora:
                trained = (mode for mode in MODES if finding.modes[mode].verdict == "equal")
                finding.modes[LORA] = compare(directory, reference, next(trained, "single"), with_lora=True)
    finding.seconds = round(time.perf_counter() - started, 2)
    return finding


def table(findings: Sequence[Finding]) -> str:
    """A line of Markdown for each type."""
    columns = ("type", *MODES, LORA, "loss", "gradients", "one tensor", "moved")
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for finding in findings:
        if finding.impossible:
            lines.append(f"| {finding.type} | not in transformers itself: {_cell(finding.impossible)} |" + " |" * 7)
            continue
        verdicts = [
            outcome.verdict + (f": {_cell(outcome.reason)}" if outcome.reason else "")
            for outcome in finding.modes.values()
        ]
        equal = [outcome for outcome in finding.modes.values() if outcome.verdict in ("equal", "wrong")]
        figures = [
            f"{max(getattr(outcome, key) for outcome in equal):.1e}" if equal else ""
            for key in ("loss", "gradients", "worst", "moved")
        ]
        lines.append(f"| {' | '.join([finding.type, *verdicts, *figures])} |")
    return "\n".join(lines) + "\n"


def totals(findings: Sequence[Finding]) -> dict[str, dict[str, int]]:
    """How many types ended how, by mode."""
    modes = (*MODES, LORA)
    found: dict[str, dict[str, int]] = {mode: {} for mode in modes}
    for finding in findings:
        for mode in modes:
            verdict = "not in transformers itself" if finding.impossible else finding.modes[mode].verdict
            found[mode][verdict] = found[mode].get(verdict, 0) + 1
    return found


def _tree(given: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in given.items():
        *path, last = key.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> int:
    """Run the campaign; exit code 1 where a type was trained wrongly or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="these types alone")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--table", type=Path, help="where the figures go, as a table of Markdown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [(each, False) for each in options.only or TYPES]
    chosen += [(each, True) for each in DECODERS if each in (options.only or TYPES)]
    findings = []
    for model_type, decoder in chosen:
        findings.append(examine(model_type, decoder))
        print(json.dumps(asdict(findings[-1])), flush=True)
    if options.out:
        options.out.write_text(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    if options.table:
        options.table.write_text(table(findings))
    found = totals(findings)
    print(json.dumps({"types": len(findings), **found}))
    return 1 if any(bad in counts for counts in found.values() for bad in ("wrong", "crashed")) else 0


if __name__ == "__main__":
    raise SystemExit(main())
