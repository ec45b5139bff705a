"""Kernels that nobody asked for by name, tried before training: what cannot be compiled here is done without.

That a compiler is there does not say that it works: it may lack the C library's headers, or meet its own limits in a
model's layers. The first forward and backward pass, on the largest micro-batch, is where that shows.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.prepared import PreparedData
from tuner.errors import MemoryLimitError, TunerError
from tuner.runtime import startup
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import another_gloo_group, any_rank, gloo_group, is_lost_rank
from tuner.setup.build import Assembly, build
from tuner.setup.mock import mock_batch
from tuner.setup.resolve import Resolved
from tuner.setup.settled import changed
from tuner.setup.timetable import Starts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WAIT_S = 120.0
"""What processes whose kernels failed wait for each other: all of them fail at one place, or it is not the kernels."""
COMPILING = "compiling the decoder layers, a minute or two"


def build_runnable(
    resolved: Resolved, prepared: PreparedData, tokenizer: TextTokenizer, rank_info: RankInfo, starts: Starts,
    console: Console,
) -> Assembly:
    """What :func:`build` makes of a resolved recipe, with kernels that run; else the same without them, and a warning.

    Compiled layers and liger's kernels are tried where ``auto`` chose them, and left out one after the other. What
    fails without them, too, is raised then, where it belongs. Collective where there are several processes; raises what
    a single one of them raises, since the others then wait inside their own collectives.
    """
    while True:
        with console.doing("loading model"):
            assembly = build(resolved, prepared, tokenizer, rank_info, starts)
        key, compiles = _chosen(resolved), resolved.compiles
        if any_rank(key is None, gloo_group()):
            if compiles:
                console.say("compile", f"the first step is spent {COMPILING}")
            return assembly
        assert key is not None
        doing = COMPILING if compiles else "compiling kernels"
        with startup.phase("compiling"), console.doing(doing, at_once=compiles):
            problem = _problem(assembly, console)
        if problem is None:
            return assembly
        del assembly
        _let_go()
        console.warn(f"{key}: auto: {problem}; the run continues without, slower and with more memory")
        resolved = _without(resolved, key, problem)


def _chosen(resolved: Resolved) -> str | None:
    """Which of the choices of ``auto`` is tried, and left out first; None where there is none."""
    recipe, chosen = resolved.recipe, resolved.reasons
    if resolved.compiles and "train.compile" in chosen:
        return "train.compile"
    return "model.kernels" if recipe.model.kernels == "liger" and "model.kernels" in chosen else None


def _without(resolved: Resolved, key: str, problem: str) -> Resolved:
    """The recipe with one choice of ``auto`` less, and the reason."""
    recipe = changed(resolved.recipe, {key: {"train.compile": False, "model.kernels": "torch"}[key]})
    return replace(resolved, recipe=recipe, reasons={**resolved.reasons, key: problem})


def _problem(assembly: Assembly, console: Console) -> str | None:
    """What keeps the largest micro-batch from being computed, in words; None where nothing or memory does."""
    alone = assembly.rank_info.world_size == 1
    group = another_gloo_group(WAIT_S)
    try:
        mock_batch(assembly, console)
    except MemoryLimitError:
        if not alone:
            raise
        return None  # that is found again, and explained, once there are tasks to do so
    except Exception as error:
        if isinstance(error, TunerError) or is_lost_rank(error) or not _on_all_ranks(group):
            raise
        words = " ".join(line.strip() for line in str(error).splitlines()[:2])
        return f"{type(error).__name__}: {words}"
    finally:
        if group is not None:
            dist.destroy_process_group(group)
    return None


def _on_all_ranks(group: ProcessGroup | None) -> bool:
    """Whether every process comes here within `WAIT_S`; one that continues with the pass never does."""
    if group is None:
        return True
    with suppress(RuntimeError):
        dist.barrier(group)
        return True
    return False


def _let_go() -> None:
    """Give the memory of what was built back, before it is built again."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
