"""Scores of a GGUF file on tasks, as llama.cpp serves it: what `tuner eval --engine llama.cpp` does."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tuner.config.eval_tasks import EvalTask
from tuner.data.building.spec import AUTO_MAX_LENGTH
from tuner.errors import RecipeError
from tuner.evals.load import check_tasks, load_tasks
from tuner.evals.scorer import before_stops
from tuner.evals.task import Likelihood, ScoreRequest
from tuner.export.gguf.engine import GREEDY, Engine, read_keys, served
from tuner.run.score import TasksScore, scored
from tuner.run.tasks.task_scores import write_scores
from tuner.runtime.console import Console

_AFTER = 8
"""Tokens of room beyond a task's longest forward: the one that is drawn, and what frames a prompt."""


@dataclass(frozen=True)
class ServedTexts:
    """The file's own tokenizer and template, as llama.cpp applies them."""

    engine: Engine

    @cached_property
    def text_prefix(self) -> list[int]:
        """See `IdSource`."""
        return self.engine.frame

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """See `IdSource`."""
        eos = self.engine.special("eos")
        return () if eos is None else (eos,)

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """See `IdSource`."""
        named = {name: self.engine.special(name) for name in ("bos", "eos")}
        return {f"{name}_token": self.engine.text([found]) for name, found in named.items() if found is not None}

    @property
    def has_template(self) -> bool:
        """See `IdSource`."""
        return self.engine.has_template

    @cached_property
    def hash(self) -> str:
        """Of the file's name, size and keys: the same file."""
        facts = [str(self.engine.path), self.engine.path.stat().st_size, sorted(self.engine.keys.items())]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def template_hash(self) -> str:
        """See `IdSource`."""
        return hashlib.sha256(str(self.engine.keys.get("tokenizer.chat_template")).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """See `IdSource`."""
        return self.engine.ids(text)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
        """Up to the assistant's turn, with the token that llama.cpp puts before it."""
        before = self.special_tokens["bos_token"] if self.engine.frame else ""
        return before + self.engine.rendered(messages)


@dataclass(frozen=True)
class ServedScorer:
    """Asks a served file what :class:`~tuner.evals.scorer.Scorer` asks a model that trains."""

    engine: Engine
    device = torch.device("cpu")

    def likelihoods(self, requests: Sequence[ScoreRequest]) -> list[Likelihood]:
        """One token after the other, each after those before it."""
        found = []
        for request in requests:
            ids, at = [*request.context, *request.continuation], len(request.context)
            each = [self.engine.log_probability(ids[:end], ids[end]) for end in range(at, len(ids))]
            found.append(Likelihood(sum(nats for nats, _ in each), all(is_first for _, is_first in each)))
        return found

    def answers(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], stops: Sequence[Sequence[str]]
    ) -> list[str]:
        """See `Respondent`."""
        asked = zip(prompts, limits, stops, strict=True)
        return [
            before_stops("".join(piece.text for piece in self.engine.answer(prompt, limit, GREEDY, stop)), stop)
            for prompt, limit, stop in asked
        ]


def score_gguf(
    path: Path, tasks: Sequence[EvalTask], max_length: int | str, console: Console, output: Path | None
) -> TasksScore:
    """Score a file on tasks; the results of items go to ``output``. ``max_length`` is that of tasks that name none.

    Raises DataError and PluginError for tasks that cannot be used, RecipeError for one longer than the model takes.
    """
    check_tasks(tasks)
    keys = read_keys(path)
    positions = int(keys.get(f"{keys.get('general.architecture')}.context_length", AUTO_MAX_LENGTH))
    length = min(positions, AUTO_MAX_LENGTH) if isinstance(max_length, str) else max_length
    longest = max([length, *(task.max_length for task in tasks if task.max_length is not None)])
    if longest > positions:
        raise RecipeError(f"{path}: takes {positions:,} tokens, and a task has up to {longest:,} (max_length)")
    with ExitStack() as stack:
        with console.doing("loading model"):
            engine = stack.enter_context(served(path, longest + _AFTER))
        console.say("model", f"{path} · {keys.get('general.architecture')} of GGUF, served by llama.cpp")
        scores, seconds = scored(load_tasks(tasks, ServedTexts(engine), length), ServedScorer(engine), console)
    if output is not None:
        write_scores(output, scores)
    return TasksScore(path, None, scores, seconds)
