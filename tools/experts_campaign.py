"""Mixtures of experts: the router's loss of every class, every expert of published files there and back, and spread.

    python -m tools.experts_campaign [router] [files] [spread] [--only TYPE ...]

router: of each causal type whose class has such a term, tiny, the loss and all gradients of one step, in several
micro-batches, packed and one document a row, against transformers' own forward of the whole batch, right-padded and
with its attention_mask: 1e-5 relative. files: published files are loaded, trained a little in full and with an adapter,
exported in fp32 and bf16, merged and kept; every tensor is compared bit for bit, each expert by its place in the name
alone. spread: of each causal type with experts, tiny, these are spread over two processes, and losses and gradients of
a row on each are held to those of the whole model, plain and recomputed: 1e-5 relative. Prints a line of JSON for each,
exits with 1 where one differs or fails.
"""

import contextlib
import copy
import json
import operator
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig

from tests.export.mixtures import round_trip
from tests.fixtures.processes import run_ranks
from tests.parallel.experts import both, differences
from tools.causal_cases import TYPES, quiet, tiny_config, write_random
from tools.causal_rows import LENGTHS, documents
from tools.causal_training import tree_of
from tools.commands import asked, workplace
from tuner.config.load import load_recipe
from tuner.data.batches import StepBatches, collate
from tuner.data.prepared import Row
from tuner.errors import RecipeError
from tuner.model.attention import withdrawn
from tuner.model.build import meta_model
from tuner.model.flops import n_experts
from tuner.model.router_loss import has_term, router_loss
from tuner.parallel.expert import check_spread
from tuner.runtime.dist import RankInfo
from tuner.setup.build import build_train_state
from tuner.setup.model import load_training_model
from tuner.setup.resolve import resolve
from tuner.train.step import forward_backward

ALLOWED = 1e-5
WEIGHT = 0.5
CUTS = (("packed", ((0, 1, 2),)), ("packed", ((0, 1), (2,))), ("single", ((0,), (1,), (2,))))
PER_EXPERT = {
    "mixtral": True, "qwen3_moe": True, "deepseek_v3": True, "glm4_moe": True, "gpt_oss": False,
    "llama4_text": False,
    "qwen2_moe": True, "deepseek_v2": True, "ernie4_5_moe": True, "olmoe": True, "minimax_m2": True,
    "granitemoe": False,
    "afmoe": True, "hunyuan_v1_moe": True, "qwen3_next": True,
}  # fmt: skip
"""Whether the published files of a type hold each expert by itself."""


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of all parameters that got one, tied ones once."""
    return {name: p.grad.detach().double() for name, p in model.named_parameters() if p.grad is not None}


def router_types() -> list[str]:
    """The causal types whose class adds the term."""
    found = []
    for name in TYPES:
        kind: Any = None
        try:
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny_config(name))]
        except Exception as error:  # noqa: BLE001 - a type that transformers cannot make has no term either
            print(json.dumps({"type": name, "not tried": str(error).splitlines()[0]}), file=sys.stderr)
        if isinstance(kind, type) and has_term(kind):
            found.append(name)
    return found


def own_step(directory: Path) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, term and gradients of transformers' own forward of all documents, filled up on the right."""
    ids, mask = (torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long) for _ in range(2))
    for row, document in enumerate(documents()):
        ids[row, : len(document)] = torch.tensor(document)
        mask[row, : len(document)] = 1
    with withdrawn():
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
        labels = ids.masked_fill(mask == 0, -100)
        out = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, output_router_logits=True)
        out.loss.backward()
    return out.loss.item(), out.aux_loss.item(), gradients_of(model)


def our_step(
    directory: Path, mode: str, cut: Sequence[Sequence[int]]
) -> tuple[float, float, dict[str, torch.Tensor], str]:
    """The same of a run's first step, and the route that its documents take."""
    given = {
        "model.name_or_path": str(directory), "tokenizer.name_or_path": "byte", "data.train": [{"path": "rows.jsonl"}],
        "data.max_length": 64, "train.precision": "fp32", "train.device": "cpu", "train.duration": "1 steps",
        "train.global_batch_size": 3, "optimizer.lr": 1e-3, "output_dir": str(directory / "run"),
        "train.micro_batch_size": 1, "model.router_aux_loss_coef": WEIGHT,
        "data.packing": "auto" if mode == "packed" else False,
    }  # fmt: skip
    resolved = resolve(load_recipe(tree_of(given)).recipe, 64, RankInfo())
    (root, _), step_config = load_training_model(resolved, RankInfo())
    state = build_train_state(resolved, root, step_config)
    rows = [
        Row(ids, np.ones(len(ids), bool), np.array([len(ids)], np.int32), np.array([number], np.int64))
        for number, ids in enumerate(documents())
    ]
    micro = [collate([rows[i] for i in part]) for part in cut]
    count = sum(len(batch.trained_positions) for batch in micro)
    sums, counts = forward_backward(state, 0, StepBatches(np.arange(3), count, sum(LENGTHS), micro))
    found = gradients_of(state.root.model)
    return float(sums.loss(counts)), float(sums.losses["router_aux"].value), found, state.root.layout.route


def router(config: PretrainedConfig, directory: Path) -> dict[str, Any]:
    """The largest difference of a type, relative, over all cuts of the batch."""
    text = config.get_text_config()
    for part in (config, text, getattr(text, "ffn_config", None)):
        for key in ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight"):
            if hasattr(part, key):
                setattr(part, key, WEIGHT)
        for key in ("router_jitter_noise", "input_jitter_noise"):
            if hasattr(part, key):
                setattr(part, key, 0.0)
    router_loss(meta_model(copy.deepcopy(config), torch.float32), WEIGHT)  # refuses a term that is not computed
    write_random(config, directory)
    loss, term, gradients = own_step(directory)
    norm = sum(float(one.norm()) ** 2 for one in gradients.values()) ** 0.5
    figures: dict[str, Any] = {"term": term}
    for mode, cut in CUTS:
        ours, our_term, found, route = our_step(directory, mode, cut)
        apart = sum(float((found[name] - one).norm()) ** 2 for name, one in gradients.items()) ** 0.5 / norm
        off = max(apart, abs(ours - loss) / abs(loss), abs(our_term / WEIGHT - term) / term)
        figures[f"{mode} {len(cut)}"] = off
        figures["route"] = route
        assert off <= ALLOWED, f"{mode} in {len(cut)}: {off:.2e}"
    return figures


def files(config: PretrainedConfig, directory: Path) -> dict[str, Any]:
    """How many tensors of experts were compared in each export."""
    config.vocab_size = max(97, int(getattr(config, "vocab_size", 97)))
    return round_trip(config, directory, PER_EXPERT[config.model_type])


def spread_types() -> list[str]:
    """The causal types that have routed experts in a tiny config."""
    found = []
    for name in TYPES:
        with contextlib.suppress(Exception):  # types that transformers cannot make are named by the other parts
            if n_experts(tiny_config(name).get_text_config()):
                found.append(name)
    return found


def spread(config: PretrainedConfig, directory: Path) -> dict[str, Any]:
    """The largest differences of two processes that have the experts of a type between them."""
    check_spread(meta_model(copy.deepcopy(config), torch.float32), 2)
    found = directory / "found.json"

    def work(rank: int) -> None:
        figures: dict[str, Any] = {}
        for level in ("none", "full"):
            place = directory / f"{level} {rank}"
            apart = differences(*both(config, place, level), rank)
            name, value = max(apart.items(), key=operator.itemgetter(1))
            figures[level] = value
            assert value <= ALLOWED, f"{level}: {name} is off by {value:.2e}"
        if rank == 0:
            found.write_text(json.dumps(figures))

    codes = run_ranks(2, directory, work)
    assert codes == [0, 0], f"the processes ended with {codes}"
    figures: dict[str, Any] = json.loads(found.read_text())
    return figures


def tried(kind: str, name: str, work: Callable[[PretrainedConfig, Path], dict[str, Any]]) -> bool:
    """Print what became of one type; whether it is right."""
    started = time.perf_counter()
    line: dict[str, Any] = {"kind": kind, "type": name}
    with workplace() as place, quiet():
        try:
            line |= {"verdict": "equal", **work(tiny_config(name), place)}
        except RecipeError as error:
            line |= {"verdict": "refused", "reason": error.message}
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is a finding
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
            line |= {"verdict": "wrong", "reason": reason}
    print(json.dumps(line | {"seconds": round(time.perf_counter() - started, 1)}), flush=True)
    return line["verdict"] != "wrong"


def main() -> int:
    """Run the parts that are named, or all."""
    options = asked(__doc__, {"parts": ([], "router, files, spread; all without one")}, only=([], "these types alone"))
    torch.set_num_threads(1)
    parts = options.parts or ["router", "files", "spread"]
    right = []
    if "router" in parts:
        right += [tried("router", name, router) for name in options.only or router_types()]
    if "files" in parts:
        right += [tried("files", name, files) for name in options.only or PER_EXPERT]
    if "spread" in parts:
        right += [tried("spread", name, spread) for name in options.only or spread_types()]
    return 0 if all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
