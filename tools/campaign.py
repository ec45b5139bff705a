"""Run the campaigns one after the other: what is too long for `make test`, which holds each in its smallest form.

    python tools/campaign.py [--only NAME ...] [--list]

Each is a command of its own, whose output goes to `.demo/campaigns/NAME.log` and which fails with its exit code. A line
says how each ended and how long it took; at the end they are a table in `.demo/campaigns/table.md`. Exits with 1 where
one failed. `same_run` compares with another tree, and is not among them: `tools/same_run.py --against TREE`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / ".demo" / "campaigns"
DEMO = str(ROOT / ".demo")

MASKED = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Instructions that torch, oneDNN and the detection of bf16 leave alone."""


@dataclass(frozen=True)
class Campaign:
    """A command and what it covers."""

    name: str
    words: tuple[str, ...]
    covers: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """Its command line."""
        script, *words = self.words
        start = ["-m", "pytest", "-q"] if script == "pytest" else [str(ROOT / "tools" / f"{script}.py")]
        return [sys.executable, *start, *words]


CAMPAIGNS = (
    Campaign("kills", ("fault_campaign", "kills", "--count", "1000"), "killed at 1,000 system calls of every job"),
    Campaign("beside", ("fault_campaign", "kills", "--beside", "--count", "300"), "the same, saved beside training"),
    Campaign("ranks", ("fault_campaign", "ranks", "--count", "100"), "two processes train; all die, or one alone"),
    Campaign("mesh-kills", ("fault_campaign", "meshes", "--count", "100"), "the same with split layers, rows, experts"),
    Campaign(
        "kill-points", ("kill_campaign", "--count", "16", "--out", f"{DEMO}/campaigns/kill-points.jsonl"),
        "killed in evaluations, in saves beside the steps, in uploads; a clock that jumps, files that end early",
    ),
    Campaign("errors", ("fault_campaign", "errors", "--count", "300"), "a full disk, EIO and short writes"),
    Campaign("compound", ("fault_campaign", "compound", "--count", "300"), "killed again during the recovery"),
    Campaign("power", ("fault_campaign", "power", "--count", "300"), "what a disk may hold after a power loss"),
    Campaign("damage", ("fault_campaign", "damage", "--count", "500"), "bits flipped and files cut in checkpoints"),
    Campaign(
        "template-limits", ("template_limits_campaign", "--out", f"{DEMO}/campaigns/template-limits.jsonl"),
        "chat templates made to take all time or memory, met by prepare-data",
    ),
    Campaign("hostile", ("fault_campaign", "hostile"), "runs, models and tokenizers made to do harm"),
    Campaign("damaged-runs", ("damaged_runs",), "a finished run damaged in every way: what commands say and do"),
    Campaign("resume", ("resume_campaign", "--trials", "20"), "killed in real processes, resumed, bit for bit"),
    Campaign(
        "resume-4bit", ("resume_campaign", "--trials", "10", "--flags", "--model.quantize", "nf4"),
        "the same on a base of 4 bits",
    ),
    Campaign("windows", ("windows_campaign",), "six windows, one late, one empty, one damaged, killed in every phase"),
    Campaign("quantized-base", ("quantized_task",), "a base of 4 and 8 bits: memory, held-out loss, 1, 2 and 4 ranks"),
    Campaign(
        "resume-host", ("resume_campaign", "--flags", "--optimizer.offload", "host", "--checkpoint.async_save", "true"),
        "the same with the optimizer's states on the host, saved in the background",
    ),
    Campaign("host", ("host_campaign", "--model", f"{DEMO}/smollm2"), "states on the host: bits, meshes, bytes"),
    Campaign("reference", ("reference_campaign", "--kills", "20"), "preferences killed, their reference included"),
    Campaign("signal", ("signal_campaign", "--trials", "50"), "Ctrl-C, SIGTERM and closed terminals on two processes"),
    Campaign(
        "moments", ("signal_campaign", "--moments", "200", "--out", f"{DEMO}/campaigns/moments.jsonl"),
        "SIGINT and SIGTERM at any moment from tuner's first line on: what commands say and leave",
    ),
    Campaign("ladder", ("ladder_campaign",), "five sizes on the standard library's documentation, killed five times"),
    Campaign("eval", ("eval_campaign",), "scores of tasks: transformers item by item, two processes, the weights"),
    Campaign("elastic", ("elastic_campaign",), "another number of processes at each resume, losses and order"),
    Campaign("machines", ("machines_campaign",), "two machines of two processes, one killed, back to the same bits"),
    Campaign("prepare", ("prepare_campaign",), "builders of data killed at every call, and racing"),
    Campaign(
        "causal", ("causal_campaign", "--again", "--out", f"{DEMO}/campaigns/causal.json"),
        "all causal types of transformers, 20 steps in ten ways, against plain loops",
    ),
    Campaign("multimodal", ("multimodal_campaign",), "language models of all multimodal types: trained and put back"),
    Campaign("proof", ("proof_campaign", "--layers", "16"), "the proof at the start, by few layers and by all"),
    Campaign("proof-faults", ("proof_campaign", "--faults"), "faults planted in layers, found by few layers as by all"),
    Campaign("experts", ("experts_campaign",), "mixtures: the router's loss, experts there and back, on two processes"),
    Campaign(
        "export", ("export_campaign", f"{DEMO}/smollm2", "--out", f"{DEMO}/campaigns/export"),
        "small and large updates published by default, wrong exports of both held back",
    ),
    Campaign(
        "tokenizer", ("tokenizer_campaign", f"{DEMO}/assets", f"{DEMO}/campaigns/tokenizers"),
        "ids and masks of training against an export's readers, 48 tokenizers",
    ),
    Campaign(
        "layouts",
        ("pytest", "tests/multi", "tests/model/test_compile.py", "tests/tools/test_signal_campaign.py"),
        "all mixtures of processes, shards, recomputing and adapters; layers by the real compiler",
    ),
    Campaign("slow", ("pytest", "-m", "slow", "tests"), "tests that cost much and resemble cheaper ones or campaigns"),
    Campaign(
        "masked", ("pytest", "-p", "tests.forks", "--forks", "3", "tests"),
        "every test as on a processor without AVX512 and bf16", MASKED,
    ),
    Campaign("rows", ("pytest", "tests/reference"), "every row of others' files and drawn ones, against transformers"),
    Campaign("pairs", ("pairs_campaign",), "5,000 mutated rows of pairs and of labels: verdict, texts and masks"),
    Campaign("advice-rows", ("advice_campaign", "rows"), "every line proposed for others' rows, followed and compared"),
    Campaign("advice-keys", ("advice_campaign", "keys"), "every answer to other tools' keys, followed and compared"),
    Campaign("advice-files", ("advice_campaign", "files"), "whole files of other tools, imported and compared"),
    Campaign("advice-hints", ("advice_campaign", "hints"), "what errors and warnings propose, provoked and followed"),
    Campaign("init", ("init_campaign",), "what init proposes for rows of 51 kinds, taken, and nothing lost unsaid"),
    Campaign("recipes", ("recipes_campaign",), "every shipped recipe: predicted for its card, two steps in small"),
    Campaign("preferences", ("preference_task",), "what shipped preference recipes teach, on held-out notes"),
    Campaign("predict", ("predict_campaign",), "predicted memory against counted allocations"),
    Campaign("combinations", ("predict_campaign", "--combinations", "60"), "the same for drawn means of needing less"),
    Campaign("meshes", ("predict_campaign", "--meshes"), "the same for tensor, sequence and expert groups"),
    Campaign("tensor", ("tensor_campaign",), "all causal types, layers over two processes: as in one, or refused"),
    Campaign("cuda", ("cuda_campaign",), "all causal types: predicted for a GPU, or refused with a reason"),
    Campaign("liger", ("liger_campaign",), "liger's kernels compiled for compute capabilities 8.0 to 12.0"),
    Campaign("quantize", ("quantize_campaign",), "4- and 8-bit codes against bitsandbytes; kernels compiled for GPUs"),
    Campaign("traffic", ("traffic_campaign",), "what sharding makes a GPU move: 8 B on 8 GPUs, 70 B on 32"),
    Campaign("auto", ("auto_campaign",), "what auto becomes for real models on real cards, by prediction"),
    Campaign(
        "precision", ("precision_campaign", "--smollm2", f"{DEMO}/smollm2"),
        "what fp16 and fp8 change of what is learned, 100 steps of each; fp16 resumed at every step",
    ),
    Campaign(
        "long-rows", ("long_rows_campaign", "--limit", "2GB", "--run"),
        "inputs on the host and tiles: gradients, peaks, and the longest rows that train in 2 GB",
    ),
    Campaign("parity", ("parity_figures", "--smollm2", f"{DEMO}/smollm2"), "packed and alone, one process and two"),
    Campaign("attention", ("attention_campaign",), "attention on CUDA by stand-ins, Triton's interpreter and compiler"),
    Campaign("spread", ("spread_campaign",), "bf16 over processes: the bits of one process's losses, 93 cases"),
    Campaign("mesh-methods", ("mesh_campaign",), "every method and adapter on every kind of mesh, against one process"),
    Campaign(
        "prove", ("prove_campaign",),
        "planted faults that tuner prove must name; eight architectures under every layout, in full and with LoRA",
    ),
    Campaign("mistakes", ("mistakes",), "134 mistakes in recipes: place and line to write in the error"),
    Campaign("flaws", ("flawed_recipes", "--launch"), "recipes with one flaw each: config check or a dry run finds it"),
    Campaign("import", ("import_campaign",), "the configurations that other tools ship, converted and trained"),
    Campaign("templates", ("template_campaign",), "built-in chat templates against those that others publish"),
    Campaign("template-masks", ("template_masks_campaign", f"{DEMO}/smollm2"), "masks in 28 templates of new models"),
    Campaign("fit", ("fit_campaign",), "how often intervals of a ladder's fit hold the run that they are about"),
    Campaign("tutorial", ("tutorial_campaign",), "docs/tutorial.md as it is written, on a real model"),
    Campaign("readme", ("readme_campaign",), "README.md and the notebook as they are written, on a real model"),
    Campaign("distill", ("distill_campaign", "--smollm2", f"{DEMO}/smollm2"), "students with a teacher and without"),
    Campaign("reshard", ("reshard_campaign",), "8-bit states and rounding by chance over 1, 2 and 4 processes"),
    Campaign("optimizer-spread", ("optimizer_spread",), "8-bit and host states against three seeds, 200 steps"),
    Campaign("gpu-day", ("gpu_day_campaign",), "tools/gpu_day in tiny shapes on a CPU, every part of it"),
    Campaign("package", ("package_campaign",), "wheel and sdist in fresh environments, outside the tree"),
    Campaign("mutants", ("mutants",), "planted faults, of which tests catch at least nine in ten"),
)  # fmt: skip


def main() -> int:
    """Run those that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [campaign.name for campaign in CAMPAIGNS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name them, and run none")
    options = parser.parse_args()
    chosen = [campaign for campaign in CAMPAIGNS if campaign.name in options.only]
    if options.list:
        for campaign in chosen:
            print(f"{campaign.name:13} {campaign.covers}\n{'':13} {' '.join(campaign.command)}")
        return 0
    PLACE.mkdir(parents=True, exist_ok=True)
    rows = [run(campaign) for campaign in chosen]
    lines = [f"| {campaign.name} | {campaign.covers} | {ended} | {minutes} |" for campaign, ended, minutes in rows]
    table = "\n".join(["| campaign | covers | ended | minutes |", "|---|---|---|---|", *lines]) + "\n"
    (PLACE / "table.md").write_text(table, encoding="utf-8")
    return 0 if all(ended == "ok" for _, ended, _ in rows) else 1


def run(campaign: Campaign) -> tuple[Campaign, str, str]:
    """Run one to its end; how it ended, and the minutes that it took."""
    started, log = time.monotonic(), PLACE / f"{campaign.name}.log"
    inputs = {"TUNER_TEST_SMOLLM2": f"{DEMO}/smollm2", "TUNER_TEST_ASSETS": f"{DEMO}/assets"}
    all_tests = {"TUNER_TEST_EVERY_ROW": "1", "TUNER_TEST_SLOW": "1"}
    environment = {"OMP_NUM_THREADS": "1", **inputs, **os.environ, **all_tests, "PYTHONPATH": str(ROOT)}
    environment |= campaign.environment
    with log.open("w") as output:
        code = subprocess.run(
            campaign.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    ended, minutes = "ok" if code == 0 else f"failed ({code})", f"{(time.monotonic() - started) / 60:.1f}"
    print(f"{campaign.name:13} {ended}, {minutes} min, {log}", file=sys.stderr, flush=True)
    return campaign, ended, minutes


if __name__ == "__main__":
    sys.exit(main())
