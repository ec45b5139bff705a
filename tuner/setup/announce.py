"""What a launch is going to do, said before it begins."""

from pathlib import Path

import numpy as np

from tuner.config.recipe import PeftAdapter
from tuner.data.prepared import PackedRows, PreparedData
from tuner.errors import counted
from tuner.model.vetting import ignored_code, untrained_indexer, weighs_routers
from tuner.runtime.console import Console
from tuner.runtime.device import TO_COMPILE, compiler_problem, triton_problem
from tuner.runtime.dist import RankInfo
from tuner.setup.resolve import Resolved
from tuner.setup.settled import in_groups, rows_at_once
from tuner.setup.specs import mesh_of, trained_count
from tuner.setup.timetable import Rates, Timetable

_LOOKED_AT = 256
"""Micro-batches that stand for all."""


def announce(
    console: Console, resolved: Resolved, table: Timetable, rate: Rates, rank_info: RankInfo, derivation: str | None
) -> None:
    """Say what a launch trains, on what, and for how long; ``derivation`` is how its steps follow, by a part."""
    recipe, plan, facts = resolved.recipe, table.plan, resolved.facts
    processes = in_groups(recipe.parallel, rank_info.world_size)
    codes = "" if recipe.model.quantize == "none" else f", linear layers in {recipe.model.quantize}"
    console.say(
        "model",
        f"{Path(resolved.model_name).name}, {_millions(resolved.n_parameters)} parameters, {_trained(resolved)} · "
        f"{facts.kind}, {recipe.train.precision} compute, {recipe.model.dtype} weights{codes}, "
        + counted(facts.threads, "thread"),
    )
    micro, row = rows_at_once(recipe.train), "packed row" if recipe.data.packs_rows else "row"
    accumulated = -(-plan.global_batch_size // (micro * mesh_of(recipe.parallel, rank_info).data_size))
    derivation = derivation or plan.derivation(recipe.train.duration, row)
    for label in ("part", "attention", "fp8", "dropout"):
        if label in resolved.reasons:
            console.say(label, resolved.reasons[label])
    by_default = f" (auto: {resolved.reasons['optimizer.lr']})" if "optimizer.lr" in resolved.reasons else ""
    step = f"micro-batch {micro} x {accumulated} accumulated x {processes}"
    console.say("plan", f"{derivation} · {step} · lr {rate}{by_default}")
    if resolved.settled:
        console.say("settled", "\n".join(f"{k} {v}: {resolved.reasons[k]}" for k, v in resolved.settled.items()))
    for sentence in (ignored_code(resolved.config), _unasked_loss(resolved), untrained_indexer(resolved.config)):
        if sentence is not None:
            console.warn(f"{recipe.model.name_or_path}: {sentence}")
    if (slower := _slower(resolved)) is not None:
        console.warn(slower)
    console.say("run", recipe.output_dir)


def announce_packing(console: Console, resolved: Resolved, data: PreparedData, planned: bool = True) -> None:
    """Say how documents go through the model where they do not lie end to end, and what that costs.

    Where that was not ``planned`` but found when the model was proven, it is a warning.
    """
    if resolved.route == "flat":
        return
    line = packing_line(resolved, data.train)
    if planned:
        console.say("packing", line)
    else:
        console.warn(f"data.packing: what was planned for documents end to end is computed apart: {line}")


def packing_line(resolved: Resolved, rows: PackedRows) -> str:
    """How documents go through the model, why, and what is computed more than for documents end to end."""
    from tuner.model.apart import computed_tokens, forwards_of

    n_rows = rows_at_once(resolved.recipe.train)
    starts = np.unique(np.linspace(0, max(0, len(rows) - n_rows), _LOOKED_AT).astype(int))
    tokens = computed = calls = 0
    for start in starts:
        chosen = range(int(start), min(int(start) + n_rows, len(rows)))
        lengths = [int(length) for i in chosen for length in rows.row(i).lengths]
        forwards = forwards_of(lengths, resolved.route)
        tokens, calls = tokens + sum(lengths), calls + len(forwards)
        computed += computed_tokens(lengths, forwards)
    cost = f"{calls / len(starts):.1f} forwards a micro-batch, compiled layers off"
    if resolved.route == "batch":
        cost = f"{1 - tokens / computed:.0%} padding, {cost}"
    return f"{resolved.reasons['packing']}; {cost}"


def _unasked_loss(resolved: Resolved) -> str | None:
    """A sentence on a term of the loss that the config weighs and does not ask for; None where there is no such one."""
    if resolved.recipe.model.router_aux_loss_coef is not None or not weighs_routers(resolved.config):
        return None
    from tuner.model.router_loss import unasked_term

    return unasked_term(resolved.config)


def _slower(resolved: Resolved) -> str | None:
    """What a training on CUDA does without because this machine cannot compile it, and how it could; None: nothing."""
    if resolved.facts.kind != "cuda":
        return None
    lacking = {"train.compile": compiler_problem("cuda"), "model.kernels": triton_problem()}
    found = [key for key, problem in lacking.items() if problem and problem in resolved.reasons.get(key, "")]
    if not found:
        return None
    what = {"train.compile": "the decoder layers are not compiled", "model.kernels": "liger's kernels are not used"}
    problem = next(filter(None, (lacking[key] for key in found)))
    return f"{problem}: {' and '.join(what[key] for key in found)}; slower, with more memory (to fix it: {TO_COMPILE})"


def _trained(resolved: Resolved) -> str:
    """What of the model is trained, and how much that is."""
    recipe, count = resolved.recipe, trained_count(resolved)
    if recipe.adapter.kind == "none" and not recipe.model.freeze:
        return "all trained"
    share = f"{_millions(count)} trained ({count / resolved.n_parameters:.2%})"
    if recipe.adapter.kind == "none":
        return f"{share}, all but {', '.join(recipe.model.freeze)}"
    if isinstance(recipe.adapter, PeftAdapter):
        return f"{share}: {recipe.adapter.config['peft_type']}, by peft's config"
    return f"{share}: {recipe.adapter.kind}, r {recipe.adapter.r}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 10**6 else f"{count:,}"
