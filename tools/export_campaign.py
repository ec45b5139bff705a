"""Export runs of every size of update by default, and wrong exports of the smallest and of the largest one.

    python -m tools.export_campaign .demo/smollm2 --out .demo/campaigns/export

24 LoRA, DoRA and full runs of SmolLM2 and of a tiny model (ranks 4 to 64, rates 5e-5 to 5e-4, 10 to 200 steps) are
trained on short chats and exported with `tuner export-hf RUN`: each must be published. Held-out answers give the gain
in loss, and how much of it is there after rounding to bf16, next to the share that the export itself gives. Then each
wrong export of `tools/export_faults.py` is made of the smallest and of the largest update: each must end with exit
code 6, with nothing published. A line for each is written as it ends to ``OUT/results.jsonl``; what is there already
is not done again. Prints tables; exits with 1 where one is not as it must be.
"""

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools import commands
from tools.commands import ROOT, Results, asked, environment, read_lines, write_lines
from tools.tables import beside

MAX_LENGTH, HELD_OUT = 64, 16
FIGURES = ("dtype", "kept", "bf16_kept", "kl", "gain")


@dataclass(frozen=True)
class Run:
    """A training: its model, what is trained, and how far."""

    model: str
    kind: str
    r: int
    lr: str
    steps: int

    @property
    def name(self) -> str:
        """What its directory is called."""
        rank = "" if self.kind == "full" else f"-r{self.r}"
        return f"{self.model}-{self.kind}{rank}-{self.lr}-{self.steps}"


SMALLEST, LARGEST = Run("smollm2", "lora", 4, "5e-5", 10), Run("smollm2", "lora", 64, "5e-4", 60)
SMALLEST_DORA, LARGEST_DORA = Run("smollm2", "dora", 4, "5e-5", 10), Run("smollm2", "dora", 64, "5e-4", 10)
RUNS = tuple(Run(**one) for one in beside(__file__))

_CITIES = {"France": "Paris", "Norway": "Oslo", "Peru": "Lima", "Egypt": "Cairo", "Japan": "Tokyo", "Italy": "Rome"}
_CITIES |= {"Kenya": "Nairobi", "Spain": "Madrid", "Greece": "Athens", "Austria": "Vienna", "Cuba": "Havana"}
_WORDS = ["amber", "brook", "cedar", "delta", "ember", "frost", "grove", "haven", "inlet", "jade", "knoll", "lemon"]
_WORDS += ["maple", "north", "ocean", "pearl"]


def chats(seed: int) -> Iterator[dict[str, Any]]:
    """Short chats of several kinds, without end: each an object with `messages`."""
    rng = random.Random(seed)
    while True:
        a, b, words = rng.randint(11, 99), rng.randint(11, 99), rng.sample(_WORDS, 3)
        country, city = rng.choice(list(_CITIES.items()))
        asked, answer = rng.choice(
            [
                (f"What is {a} plus {b}?", f"The sum is {a + b}."),
                (f"The capital of {country}?", f"It is {city}, the capital of {country}."),
                (f"Sort: {', '.join(words)}.", f"Sorted: {', '.join(sorted(words))}."),
                (f"Count the letters of {words[0]}.", f"There are {len(words[0])} letters in {words[0]}."),
            ]
        )
        yield {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def main() -> int:
    """Train, export, plant; print what came of it."""
    options = asked(
        __doc__, {"model": (Path, "directory of SmolLM2-135M-Instruct")}, out=ROOT / ".demo" / "campaigns" / "export",
    )
    out = options.out.absolute()
    models = prepare(out, options.model.absolute())
    results = Results(out / "results.jsonl")
    done = {row["name"] for row in results.rows}
    jobs = [(run.name, partial(published, out, run, models[run.model])) for run in RUNS]
    jobs += [(f"{run.name}: {fault.name}", partial(held_back, out, run, fault)) for run, fault in planted()]
    for name, job in jobs:
        if name not in done:
            results.add({"name": name, **job()})
    return summary(results.rows)


def planted() -> Iterator[tuple[Run, Any]]:
    """Each fault on the smallest and on the largest update that can have it."""
    from tools.export_faults import FAULTS

    for fault in FAULTS:
        for run in (SMALLEST_DORA, LARGEST_DORA) if fault.of == "dora" else (SMALLEST, LARGEST):
            yield run, fault


def published(out: Path, run: Run, model: Path) -> dict[str, Any]:
    """Train it and export it by default; the loss on held-out answers of the base, the trained model and the export."""
    train(out, run, model)
    directory, output = out / "runs" / run.name, out / "exports" / run.name
    document = command(["export-hf", str(directory), "--output", str(output)], out)
    figures = document["metrics"] if document["exit_code"] == 0 else {}
    row = {"exit": document["exit_code"], **{key: figures.get(key) for key in FIGURES}}
    if row["exit"] != 0:
        return row | {"error": document["error"]}
    exact = output if row["dtype"] == "fp32" else out / "exports" / f"{run.name}-fp32"
    if exact != output:
        command(["export-hf", str(directory), "--output", str(exact), "--dtype", "fp32"], out)
    row["loss"] = losses(out, {"base": model, "trained": exact, "exported": output})
    for path in {exact, output}:
        shutil.rmtree(path)
    return row


def losses(out: Path, models: dict[str, Path]) -> dict[str, float]:
    """Loss on the answers of held-out chats, in float32, of these models and of the trained one rounded to bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(models["base"])
    texts = []
    for row in read_lines(out / "eval.jsonl"):
        chat = row["messages"]
        prompt, whole = (
            tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=len(part) == 1)
            for part in (chat[:1], chat)
        )
        texts.append([tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, whole)])

    @torch.no_grad()
    def loss(model: Any) -> float:
        total, count = 0.0, 0
        for prompt, whole in texts:
            chances = model(input_ids=torch.tensor([whole])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            total -= float(chances.gather(1, torch.tensor(whole[len(prompt) :])[:, None]).sum())
            count += len(whole) - len(prompt)
        return round(total / count, 5)

    found = {}
    for name, path in models.items():
        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(path, dtype=torch.float32).eval()
        found[name] = loss(model)
        if name == "trained":
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16().float()
            found["bf16"] = loss(model)
    return found


def held_back(out: Path, run: Run, fault: Any) -> dict[str, Any]:
    """Export with a fault planted: what came of it, nothing where it was held back."""
    from tools.export_faults import hold_back

    output = out / "planted" / run.name
    wrong = hold_back(out / "runs" / run.name, fault, output)
    shutil.rmtree(output, ignore_errors=True)
    return {"fault": fault.name, "wrong": wrong}


def summary(rows: list[dict[str, Any]]) -> int:
    """Print the tables; 1 where an export was not published, or a planted fault was."""
    exports, faults = ([row for row in rows if ("fault" in row) == is_fault] for is_fault in (False, True))
    print("| run | type | gain in loss | kept by bf16 | as the export says |\n|---|---|---|---|---|")
    for row in exports:
        loss = row.get("loss")
        if loss is None:
            print(f"| {row['name']} | exit {row['exit']} | | | |")
            continue
        gain = loss["base"] - loss["trained"]
        said = row["kept"] if row["bf16_kept"] is None else row["bf16_kept"]
        kept = (loss["base"] - loss["bf16"]) / gain
        print(f"| {row['name']} | {row['dtype']} | {gain:.4f} | {kept:.0%} | {said:.0%} |")
    done = sum(row["exit"] == 0 for row in exports)
    held = sum(not row["wrong"] for row in faults)
    for row in faults:
        if row["wrong"]:
            print(f"{row['name']}: {row['wrong']}")
    print(f"{done} of {len(exports)} published, {held} of {len(faults)} wrong exports held back")
    return 0 if (done, held) == (len(exports), len(faults)) else 1


def prepare(out: Path, smollm2: Path) -> dict[str, Path]:
    """Write the rows and a tiny model with SmolLM2's tokenizer, its weights in bf16 as published ones are."""
    out.mkdir(parents=True, exist_ok=True)
    for name, seed, count in (("train", 1, 900), ("eval", 2, HELD_OUT)):
        source = chats(seed)
        write_lines(out / f"{name}.jsonl", itertools.islice(source, count))
    tiny = out / "tiny"
    if not (tiny / "config.json").is_file():
        import torch
        from transformers import AutoTokenizer
        from transformers.models.llama import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=49152, num_key_value_heads=2, tie_word_embeddings=True, **shape)
        model = LlamaForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(tiny)
        AutoTokenizer.from_pretrained(smollm2).save_pretrained(tiny)
    return {"smollm2": smollm2, "tiny": tiny}


def train(out: Path, run: Run, model: Path) -> None:
    """Train one, unless that is done. Raises RuntimeError where it does not end well."""
    directory = out / "runs" / run.name
    adapter = {"lora": "lora", "dora": "dora", "full": "none"}[run.kind]
    words = ["train", str(out / "recipe.yaml"), "--name", run.name, "--output_dir", str(directory)]
    words += ["--model.name_or_path", str(model), "--optimizer.lr", run.lr, "--train.duration", f"{run.steps} steps"]
    words += ["--adapter.kind", adapter] + ([] if run.kind == "full" else ["--adapter.r", str(run.r)])
    (out / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    if (document := command([*words, "--resume", "auto"], out))["exit_code"] != 0:
        raise RuntimeError(f"{run.name} is not trained: {document['error']}")


RECIPE = f"""\
version: 1
model: {{name_or_path: tiny}}
data: {{train: train.jsonl, max_length: {MAX_LENGTH}}}
train: {{global_batch_size: 2, micro_batch_size: 2, duration: 10 steps}}
eval: {{samples: 0}}
checkpoint: {{every: never, keep: 1}}
"""


def command(words: list[str], out: Path) -> dict[str, Any]:
    """The document that a command of tuner answers with. Raises RuntimeError where it gives none."""
    ended = commands.run(["-m", "tuner", *words, "--json"], out, environment(out / "cache"))
    try:
        document: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        raise RuntimeError(f"{words[0]} ended with {ended.returncode}: {ended.stderr[-2000:]}") from None
    return document


if __name__ == "__main__":
    raise SystemExit(main())
