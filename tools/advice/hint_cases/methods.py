"""What methods, optimizers and schedules say of rows, of code of one's own, and of a run's length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.advice.hint_cases.config import files
from tools.advice.hint_cases.runs import pairs
from tools.advice.hint_cases.setup import RANDOM, check, config, family
from tools.advice.hint_place import Change
from tools.advice.hint_words import RUN

OWN = """
import torch

class Whole(torch.optim.Optimizer):
    def __init__(self, groups, lr, **options):
        super().__init__(groups, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.sub_(group["lr"] * one.grad / (one.grad.norm() + 1e-8))

def loss():
    return lambda *given: None
"""
MARGIN, TRAIN = {"method.margin": "rows", "data.train": "pairs.jsonl"}, "train r.yaml"
ADDED = {RUN: ["mv good.jsonl pairs.jsonl"]}


def margins(place: Path) -> None:
    """Pairs without margins, and the same with them."""
    pairs(place)
    rows = map(json.loads, (place / "pairs.jsonl").read_text().splitlines())
    (place / "good.jsonl").write_text("".join(json.dumps({**row, "margin": 0.5}) + "\n" for row in rows))


def both(*changes: Change) -> Change:
    """One change after the other."""
    return lambda place: [change(place) for change in changes]


def large(place: Path) -> None:
    """Weights that fp16 does not hold."""
    from safetensors.torch import load_file, save_file

    path = place / "model" / "model.safetensors"
    save_file({name: tensor * 1e6 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def of_type(name: str, **values: Any) -> Change:
    """The config of the tiny model that the campaign of causal types takes."""

    def change(place: Path) -> None:
        from tools.causal_cases import tiny_config

        tiny_config(name).save_pretrained(place / "model")
        config(vocab_size=300, **values)(place)

    return change


WITH_MARGIN = {"add a margin to each row": "mv good.jsonl pairs.jsonl"}
CASES = (
    *(
        check(
            f"train/methods/{site}.columns",
            {"method.kind": kind, **MARGIN},
            {"method.margin": "none"},
            ADDED,
            words=TRAIN,
            change=margins,
            reading=WITH_MARGIN,
            dear=True,
        )
        for kind, site in (("dpo", "dpo.py:Dpo"), ("reward", "reward.py:Reward"))
    ),
    check(
        "train/methods/method.py:check_logits",
        {**RANDOM, "model.config": {"vocab_size": 300}, "method.kind": "custom", "method.use": "own.py:loss"},
        {"method": {"kind": "sft"}},
        {"method": {"kind": "pretrain"}},
        words=TRAIN,
        change=both(family("gemma3"), config(final_logit_softcapping=30.0), files(own__py=OWN)),
        reading={"method.kind: sft or pretrain": "method: {kind: sft}, or method: {kind: pretrain}"},
        dear=True,
    ),
    check(
        "run/trial.py:_require_elementwise",
        {
            "optimizer.kind": "custom",
            "optimizer.use": "own.py:Whole",
            "optimizer.lr": 1e-3,
            "optimizer.elementwise": True,
        },
        {"optimizer.elementwise": False},
        words=TRAIN,
        change=files(own__py=OWN),
        reading={"; it then needs parallel.shard: none on several processes": ""},
    ),
    check(
        "train/schedule.py:_without_overlap",
        {
            "schedule.kind": "wsd_s",
            "schedule.periods": ["4 steps", "400 steps"],
            "train.duration": "400 steps",
        },
        {"schedule.periods": ["99 steps", "400 steps"]},
        {"schedule.warmup": "never"},
        reading={"a longer first period": "periods: [99 steps, 400 steps]"},
    ),
    check(
        "train/diagnose.py:diverged",
        {"train.precision": "fp16"},
        {"train.precision": "fp32"},
        {"train.precision": "bf16"},
        words=TRAIN,
        change=large,
        reading={"train.precision: fp32 or bf16 has": "write train.precision: fp32 or bf16"},
        dear=True,
    ),
    check(
        "profile/tracing.py:refusing",
        {**RANDOM},
        {RUN: ["profile r.yaml --measure 1"]},
        words="profile r.yaml",
        instead=True,
        dear=True,
        change=of_type("dbrx"),
    ),
    check(
        "model/router_loss.py:router_loss",
        {**RANDOM, "model.router_aux_loss_coef": 0.1},
        {"model.router_aux_loss_coef": 0},
        words=TRAIN,
        change=of_type("doge"),
        dear=True,
    ),
)
