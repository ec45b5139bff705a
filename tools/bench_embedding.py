"""Time and memory of steps with a large embedding: row by row (`optimizer.rows`), against the dense AdamW, in turns.

    python -m tools.bench_embedding [--vocabulary 1000000] [--width 256] [--tokens 4096] [--rounds 7] [--threads N]

A reward model of two layers, whose output is a score: the embedding is nearly all of it. Each way trains in a process
of its own, which waits while the other takes its step; tokens are drawn evenly, so that nearly all of a step's differ,
or with `--skew 1` as words are (Zipf). Prints for both ways the medians of a step's seconds and of its parts, the bytes
of its gradients and states, and the most that the process had resident; at the end what is left of the dense one's, the
median over the rounds. Steps are whole ones: forward, backward, the norm over all gradients, clipping, guard, update.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.commands import asked, workplace
from tools.measures import memory

WAYS: dict[str, list[str]] = {"dense": [], "rows": ["embed_tokens"]}
LENGTH = 512
"""Tokens of a micro-batch."""
MIB = 1 << 20


def write_model(directory: Path, vocabulary: int, width: int) -> None:
    """The config of a model that is little more than its embedding."""
    from transformers.models.llama import LlamaConfig

    LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=LENGTH, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)


class Worker:
    """One way of training, in this process."""

    def __init__(self, directory: Path, way: str, options: argparse.Namespace) -> None:
        from tuner.config.load import load_recipe
        from tuner.runtime.dist import RankInfo
        from tuner.setup.build import build_train_state
        from tuner.setup.mock import full_rows
        from tuner.setup.model import load_training_model
        from tuner.setup.resolve import resolve

        self.micro, self.skew, self.vocabulary = -(-options.tokens // LENGTH), options.skew, options.vocabulary
        tree: dict[str, Any] = {
            "model": {"name_or_path": str(directory), "init": "random"}, "method": {"kind": "reward"},
            "data": {"train": "rows.jsonl", "max_length": LENGTH},
            "train": {"global_batch_size": self.micro, "precision": "fp32", "device": "cpu"},
            "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "rows": WAYS[way]},
        }
        alone = RankInfo()
        resolved = resolve(load_recipe(tree).recipe, LENGTH, alone)
        (root, _), step_config = load_training_model(resolved, alone)
        self.state = build_train_state(resolved, root, step_config)
        self.rows = self.state.method.made_up(full_rows(resolved.recipe.method.examples, LENGTH, 1, self.vocabulary))
        self.index = 0

    def step(self) -> dict[str, float]:
        """Take a step; the seconds of it and of its parts, and how many rows it touched."""
        import numpy as np

        from tuner.data.batches import step_of
        from tuner.runtime import phase
        from tuner.train.step import optimizer_step

        rng, marks = np.random.default_rng(self.index), list[tuple[str, float]]()
        shape = (self.micro, LENGTH)
        evenly = rng.integers(0, self.vocabulary, shape)
        drawn = rng.zipf(1 + self.skew, shape) % self.vocabulary if self.skew else evenly
        batches = step_of([replace(self.rows, input_ids=ids.astype(np.int64)) for ids in drawn])
        started = time.perf_counter()
        with phase.observed(lambda part: marks.append((part, time.perf_counter()))):
            optimizer_step(self.state, self.index, batches, 1.0).read()
        ended = time.perf_counter()
        self.index += 1
        spent = {"step": ended - started, "rows": float(len(np.unique(drawn)))}
        for (part, at), (_, until) in zip(marks, [*marks[1:], ("", ended)], strict=True):
            spent[part] = spent.get(part, 0.0) + until - at
        return spent

    def bytes_held(self) -> dict[str, int]:
        """Of the gradients of a step, and of the optimizer's states."""
        from tuner.data.batches import step_of
        from tuner.train.step import forward_backward

        forward_backward(self.state, self.index, step_of([self.rows] * self.micro))
        gradients = sum(tensor.numel() * tensor.element_size() for _, tensor in self.state.gradient_tensors())
        self.state.optimizer.zero_grad()
        states = self.state.optimizer.local_tensors()
        return {"gradients": gradients, "states": sum(one.numel() * one.element_size() for one in states)}


def work(directory: Path, way: str, options: argparse.Namespace) -> None:
    """Take a step for each line that comes in, and say what it took."""
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    worker = Worker(directory, way, options)
    for line in sys.stdin:
        found = worker.step() if line.strip() == "step" else {"peak": memory("VmHWM"), **worker.bytes_held()}
        print(json.dumps(found), flush=True)


class Way:
    """A process that takes a step when it is asked to."""

    def __init__(self, directory: Path, name: str, words: list[str]) -> None:
        command = [sys.executable, "-m", "tools.bench_embedding", *words, "--worker", str(directory), name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str) -> dict[str, float]:
        """Send a line, and read the answer. Raises RuntimeError where the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a worker ended with {self._process.wait()}")
        found: dict[str, float] = json.loads(answer)
        return found

    def end(self) -> None:
        """Let the process end."""
        self._process.communicate()


def compared(options: argparse.Namespace, words: list[str]) -> list[dict[str, Any]]:
    """A line for each way, and one that compares them."""
    with workplace() as directory:
        write_model(directory, options.vocabulary, options.width)
        ways = {name: Way(directory, name, words) for name in WAYS}
        for way in ways.values():
            way.ask("step")  # the first one takes the memory
        rounds = [{name: way.ask("step") for name, way in ways.items()} for _ in range(options.rounds)]
        held = {name: way.ask("held") for name, way in ways.items()}
        for way in ways.values():
            way.end()
    lines: list[dict[str, Any]] = []
    for name in WAYS:
        middle = {part: statistics.median(one[name][part] for one in rounds) for part in rounds[0][name]}
        seconds = {f"{part}_s": round(value, 4) for part, value in middle.items() if part != "rows"}
        sizes = {f"{part}_mib": round(size / MIB, 1) for part, size in held[name].items()}
        lines.append({"way": name, "rows": int(middle["rows"]), **seconds, **sizes})
    ratio = statistics.median(one["rows"]["step"] / one["dense"]["step"] for one in rounds)
    update = statistics.median(one["rows"]["optimizer"] / one["dense"]["optimizer"] for one in rounds)
    left = {part: round(held["rows"][part] / held["dense"][part], 3) for part in held["dense"]}
    return [*lines, {"way": "rows / dense", "step": round(ratio, 3), "optimizer": round(update, 3), **left}]


def main() -> int:
    """Compare, or be one of the two processes."""
    options = asked(
        __doc__, vocabulary=1_000_000, width=256, tokens=(4096, "of a step, in micro-batches of 512"), rounds=7,
        skew=0.0, threads=int, worker=({"nargs": 2, "metavar": ("DIRECTORY", "WAY")}, argparse.SUPPRESS),
    )
    if options.worker:
        work(Path(options.worker[0]), options.worker[1], options)
        return 0
    for line in compared(options, sys.argv[1:]):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
