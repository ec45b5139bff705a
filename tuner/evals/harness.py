"""Tasks of lm-evaluation-harness: its items, prompts and metrics, asked of the model that trains.

Every process builds the same requests and is the harness's only one: what is divided between processes is each list
of requests, by :class:`~tuner.evals.scorer.Scorer`. (lm_eval is imported with this module alone.)
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lm_eval import evaluator
from lm_eval.api.model import LM

from tuner.config.eval_tasks import HARNESS, EvalTask
from tuner.errors import RecipeError, TunerError
from tuner.evals.figures import Result
from tuner.evals.task import Asker, Respondent, ScoredTask, TaskScore
from tuner.runtime.plugins import naming
from tuner.runtime.process import Collective, gloo_group

NEW_TOKENS = 256
"""Tokens of an answer at most, where a task names no limit; that of the harness's own models."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessTask(ScoredTask):
    """A task, group or tag of lm-evaluation-harness, by its name there or the path of its YAML."""

    def __init__(self, task: EvalTask, asker: Asker) -> None:
        self.name, self._task, self._asker = task.label, task, asker

    @property
    def figures(self) -> tuple[str, ...] | None:
        """Known once it was scored."""
        return None

    def score(self, scorer: Respondent) -> TaskScore:
        """Have the harness ask the model. Collective. Raises PluginError for whatever the harness raises."""
        started, model = time.monotonic(), AskedModel(scorer, self._asker)
        named = self._task.task.removeprefix(HARNESS)
        with unchanged_randomness(), naming(f"eval.tasks {self.name} (lm_eval {named})", None, (TunerError,)):
            whole = evaluator.simple_evaluate(
                model=model, tasks=[named], num_fewshot=self._task.num_fewshot, limit=self._task.max_items,
                bootstrap_iters=0, apply_chat_template=self._task.chat, log_samples=True,
            )
        # The harness gives its results to the first process of a machine alone.
        figures, results = Collective(gloo_group()).on_rank0(lambda: _parts(whole, named, self.name))
        return TaskScore(self.name, figures, results, time.monotonic() - started, model.cut)


class AskedModel(LM):  # type: ignore[misc]
    """A scorer as the harness asks models."""

    def __init__(self, scorer: Respondent, asker: Asker) -> None:
        super().__init__()
        self._scorer, self._asker, self._device = scorer, asker, scorer.device
        self.cut = 0
        """Prompts that lost their beginning."""

    @property
    def tokenizer_name(self) -> str:
        """By what the harness knows a chat template."""
        return self._asker.tokenizer.hash

    def chat_template(self, chat_template: bool | str = False) -> str:
        """By what the harness knows a chat template."""
        return self._asker.tokenizer.template_hash or ""

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Messages as text."""
        return self._asker.tokenizer.render(chat_history, add_generation_prompt=add_generation_prompt)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each continuation after its context, and whether it is the greedy one."""
        asked = [self._asker.pair(request.args[0], request.args[1]) for request in requests]
        requests_that_fit, cut = self._asker.fitted(asked)
        self.cut += cut
        return [(one.log_likelihood, one.is_greedy) for one in self._scorer.likelihoods(requests_that_fit)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-likelihood in nats of each text."""
        windows = [list(self._asker.windows(request.args[0])) for request in requests]
        said = iter(self._scorer.likelihoods([request for own in windows for request in own]))
        return [sum(next(said).log_likelihood for _ in own) for own in windows]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The greedy answer to each prompt. Raises RecipeError for a task that draws tokens."""
        prompts, limits, stops = [], [], []
        for request in requests:
            text, given = request.args
            if given.get("do_sample") and given.get("temperature", 1.0):
                raise RecipeError("this task of lm-evaluation-harness draws tokens; answers here are greedy")
            limit = next((int(given[name]) for name in _LIMITS if given.get(name) is not None), NEW_TOKENS)
            ids = self._asker.prompt(text)
            room = max(1, self._asker.longest - limit)
            self.cut += len(ids) > room
            until = given.get("until") or []
            prompts.append(ids[-room:])
            limits.append(limit)
            stops.append([until] if isinstance(until, str) else [stop for stop in until if stop])
        return self._scorer.answers(prompts, limits, stops)


@contextmanager
def unchanged_randomness() -> Iterator[None]:
    """The random states of Python, NumPy and torch afterwards are those before: the harness sets seeds of its own."""
    python, arrays = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def _parts(whole: Mapping[str, Any], named: str, label: str) -> tuple[dict[str, float], list[Result]]:
    """The figures of a task or group, and the results of its items. Raises RecipeError where it measured nothing."""
    found = whole["results"]
    own = found.get(named) or found.get(label) or (next(iter(found.values())) if len(found) == 1 else None)
    if own is None:
        raise RecipeError(
            f"eval.tasks {label}: lm-evaluation-harness has no figure of {named} as a whole",
            hint=f"name its tasks one by one: {', '.join(f'lm_eval:{name}' for name in sorted(found)[:5])}",
        )
    figures = {
        _named(metric, chosen): float(value) for key, value in own.items()
        for metric, comma, chosen in [key.partition(",")]
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float))
    }
    results: dict[str, dict[str, Any]] = {}
    for task, samples in whole["samples"].items():
        for sample in samples:
            result = results.setdefault(f"{task}/{sample['doc_id']}", {"id": f"{task}:{sample['doc_hash'][:12]}"})
            _add(result, sample)
    return figures, list(results.values())


def _add(result: dict[str, Any], sample: Mapping[str, Any]) -> None:
    """What one sample adds to its item's result: numbers, or a likelihood with the bytes that it is of."""
    for metric in sample["metrics"]:
        value = sample[metric]
        if isinstance(value, (bool, int, float)):
            result.setdefault("figures", {})[_named(metric, sample["filter"])] = float(value)
        elif metric in {"byte_perplexity", "bits_per_byte"}:
            result["sums"] = {"nats": -float(value[0]), "bytes": float(value[1])}
    if not ({"figures", "sums"} & result.keys()):
        result["figures"] = {}


def _named(metric: str, chosen: str) -> str:
    """The name of a metric, with that of the filter where it is not the only one."""
    return metric if chosen == "none" else f"{metric}_{chosen}"
