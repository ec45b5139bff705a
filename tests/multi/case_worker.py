"""Takes real optimizer steps for many cases, each on as many processes as it names, and writes losses and gradients.

A case with a `recipe` is a whole run of that file instead, in which the collectives of its third step are counted; one
with `answers` is a global batch of answers.

Started once: it loads the libraries, becomes four processes by forking, and these form a new process group for each
case. `python case_worker.py CASES_JSON OUTPUT_DIRECTORY`
"""

import contextlib
import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils._python_dispatch import _disable_current_modes

from tests.fixtures.tensors import Operations, collectives, whole
from tests.multi.answer_cases import run_answers
from tests.multi.launcher import bound_listener, open_store
from tests.train.synthetic import assembly_for, recipe_for
from tuner.config.load import Override, load_recipe
from tuner.model import tiles
from tuner.run.main import train
from tuner.run.options import LaunchOptions
from tuner.run.tasks import evaluate as evaluate_task
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import process_group
from tuner.train import loop
from tuner.train.step import TrainState, optimizer_step

WORLD = 4


def run_whole(case: dict[str, Any], rank_info: RankInfo, output: Path) -> None:
    """Train as the command does; what is counted lies between the beginnings of the third and the fourth step."""
    real, answer, counter = loop.optimizer_step, evaluate_task.answer_samples, Operations(collectives)

    def counted(train_state: TrainState, index: int, *rest: Any) -> Any:
        if index == 2:
            counter.__enter__()
        elif index == 3:
            counter.__exit__(None, None, None)
        return real(train_state, index, *rest)

    def signalled(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return answer(*args)

    recipe = Path(case["recipe"])
    overrides = [Override(key, text) for key, text in case["flags"].items()]
    loop.optimizer_step = counted
    if rank_info.rank == case.get("signalled"):
        evaluate_task.answer_samples = signalled
    try:
        loaded = load_recipe(recipe, overrides, recipe.parent)
        result = train(loaded, LaunchOptions(resume="auto"), rank_info, Console(main=False))
    finally:
        loop.optimizer_step, evaluate_task.answer_samples = real, answer
    if rank_info.is_main:
        found = {"collectives": Counter(counter.found), "status": result.status, "step": result.step}
        (output / f"{case['name']}.json").write_text(json.dumps(found))


def overflow(output: Any, step: int) -> None:
    """Have the gradient of the decoder's output be infinite in the second step."""
    if step == 1 and output.last_hidden_state.requires_grad:
        output.last_hidden_state.register_hook(lambda gradient: gradient * float("inf"))


def run_steps(case: dict[str, Any], rank_info: RankInfo, output: Path) -> None:
    """Take steps and keep the losses, the gradients before the update, and the collectives of the second step."""
    model = Path(case["model"])
    if case["long"]:
        tiles.LEAST = 8  # rows of 128 tokens are four tiles
    recipe = recipe_for(
        model,
        adapter=case["adapter"],
        train={
            "global_batch_size": case["global"], "micro_batch_size": case["micro"], "precision": case["precision"],
            "max_grad_norm": "never", "gradient_checkpointing": case["recompute"], "offload_activations": case["long"],
            "tiled_mlp": case["long"],
        },
        data={"shuffle": False, "train": str(model / "rows.jsonl")},
        parallel={
            "shard": case["shard"], "replicas": case["replicas"], "reshard_after_forward": case["reshard"],
            "accumulate": case["accumulate"],
        },
        method=case["method"],
    )
    gradients: dict[str, torch.Tensor] = {}
    counter, taken = Operations(collectives), []
    with process_group(rank_info, "cpu", 60):
        assembly = assembly_for(recipe, case["trained"], rank_info, packed=case["packed"])
        train_state = assembly.train_state
        real = train_state.optimizer.step

        def spy(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                found = {n: p.grad for n, p in train_state.parameters.items() if p.grad is not None}
                gradients.update({f"{len(taken)}.{name}": whole(gradient) for name, gradient in found.items()})
            return real(*args, **options)

        train_state.optimizer.step = spy  # type: ignore[method-assign]
        if rank_info.rank == case.get("overflow"):
            decoder = train_state.root.model.get_decoder()
            decoder.register_forward_hook(lambda _, __, output: overflow(output, len(taken)))
        for step in range(case["steps"]):
            batches = assembly.batches.step(step)
            with counter if step == 1 else contextlib.nullcontext():
                taken.append(optimizer_step(train_state, step, batches, case["factor"]))
    results = [scalars.read() for scalars in taken]
    if rank_info.is_main:
        facts = {
            "loss": [r.loss for r in results],
            "grad_norm": [r.grad_norm for r in results],
            "figures": [dict(r.figures) for r in results],
            "skipped": [r.skipped for r in results],
            "collectives": Counter(counter.found),
        }
        (output / f"{case['name']}.json").write_text(json.dumps(facts))
        save_file(gradients, output / f"{case['name']}.safetensors")


def run_rank(rank: int, cases: list[dict[str, Any]], output: Path) -> None:
    for case in cases:
        gc.freeze()  # the end of each group looks for cycles: not among what was there before
        if rank < case["world"]:
            rank_info = RankInfo(rank, case["world"], rank % case["local"], case["local"])
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case["port"]))
            run = run_whole if "recipe" in case else run_answers if "answers" in case else run_steps
            run(case, rank_info, output)
            assert not dist.is_initialized()


def main() -> int:
    cases, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    listeners = [bound_listener() for _ in cases]
    for case, (_, port) in zip(cases, listeners, strict=True):
        case["port"] = port
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run_rank(rank, cases, output)
                code = 0
            except BaseException:  # told by the traceback and by the exit code
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    stores = [open_store(listener, port) for listener, port in listeners]  # after forking: each has a thread
    assert len(stores) == len(cases)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    raise SystemExit(main())
