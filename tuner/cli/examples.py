"""What help shows of each command besides its options: examples, and where the command belongs."""

from __future__ import annotations

GROUPED: dict[str, tuple[str, ...]] = {
    "Begin": ("init", "import", "recipes", "config", "doctor"),
    "Data": ("prepare-data", "data"),
    "Train": ("profile", "prove", "train", "ladder", "resume", "verify-resume", "runs"),
    "Use": ("eval", "compare", "generate", "chat", "export-hf", "push"),
    "Help": ("help",),
}
"""The commands as `tuner --help` groups them."""

WITH_FLAGS = frozenset({
    "prepare-data", "train", "ladder plan", "ladder run", "resume", "eval", "profile", "prove", "config check",
    "config show",
})  # fmt: skip
"""Commands that take keys of the recipe as flags."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "tuner init -m HuggingFaceTB/SmolLM2-135M -d chats.jsonl > recipe.yaml",
        "tuner train recipe.yaml",
        "tuner chat recipe    # the run in ./runs/recipe",
    ),
    "init": (
        "tuner init -m HuggingFaceTB/SmolLM2-135M -d chats.jsonl > recipe.yaml",
        "tuner init -m ./my-model -d notes.txt > recipe.yaml",
        "tuner init --example orders > recipe.yaml",
    ),
    "import": (
        "tuner import axolotl.yaml > recipe.yaml",
        "tuner import sft.yaml --from trl --processes 8 > recipe.yaml",
    ),
    "prepare-data": (
        "tuner prepare-data recipe.yaml",
        "tuner prepare-data recipe.yaml --explain 3  # what is trained, token by token",
        "tuner prepare-data recipe.yaml --data.max_length 1024 --dry-run",
    ),
    "data list": ("tuner data list",),
    "data show": ("tuner data show 9f3c",),
    "data verify": ("tuner data verify",),
    "data gc": ("tuner data gc --dry-run", "tuner data gc --unused"),
    "train": (
        "tuner train recipe.yaml",
        "tuner train recipe.yaml --dry-run",
        "tuner train recipe.yaml --name hotter --optimizer.lr 3e-4",
        "tuner train recipe.yaml --resume auto    # start, or resume",
    ),
    "ladder": ("tuner ladder plan ladder.yaml", "tuner ladder run ladder.yaml", "tuner ladder metrics ladder.yaml"),
    "ladder plan": (
        "tuner ladder plan ladder.yaml",
        "tuner ladder plan ladder.yaml --rung 190M --device h100-80g",
    ),
    "ladder run": (
        "tuner ladder run ladder.yaml    # every rung that is not done",
        "tuner ladder run ladder.yaml --rung 190M",
    ),
    "ladder status": ("tuner ladder status ladder.yaml", "tuner ladder status runs/ladder --json"),
    "ladder metrics": ("tuner ladder metrics ladder.yaml > marks.csv", "tuner ladder metrics runs/ladder --json"),
    "ladder fit": (
        "tuner ladder fit ladder.yaml --target 1B --tokens 20B",
        "tuner ladder fit ladder.yaml --target 370M    # predicted from the others",
        "tuner ladder fit points.csv --score sums/acc --chance 0.25",
    ),
    "resume": (
        "tuner resume recipe    # ./runs/recipe, or the run of ./recipe.yaml",
        "tuner resume runs/recipe --dry-run",
        'tuner resume recipe --reset schedule --train.duration "4 epochs"   # longer',
    ),
    "verify-resume": ("tuner verify-resume runs/recipe", "tuner verify-resume recipe --steps 5"),
    "eval": (
        "tuner eval runs/recipe",
        "tuner eval my-model recipe.yaml",
        "tuner eval recipe --data.eval other.jsonl",
        "tuner eval my-model --tasks quiz.jsonl --output scores",
    ),
    "compare": ("tuner compare scores/base scores/trained", "tuner compare runs/a runs/b --level 0.99"),
    "export-hf": (
        "tuner export-hf runs/recipe",
        "tuner export-hf recipe --step best --dtype fp32 --output my-model",
        "tuner export-hf recipe --adapter keep --base-model Qwen/Qwen3-0.6B",
    ),
    "push": (
        "tuner push runs/recipe/exports/step-40 me/my-model --private",
        "tuner push recipe me/my-model    # the newest export of ./runs/recipe",
    ),
    "runs": ("tuner runs list", "tuner runs compare first second", "tuner runs plot first second"),
    "runs list": ("tuner runs list", "tuner runs list /data/runs --json"),
    "runs show": ("tuner runs show recipe",),
    "runs compare": ("tuner runs compare first second", "tuner runs compare runs/*"),
    "runs plot": ("tuner runs plot recipe", "tuner runs plot runs/* --output curves.html"),
    "runs verify": ("tuner runs verify runs/*",),
    "runs rm": ("tuner runs rm first second",),
    "generate": (
        'tuner generate runs/recipe --prompt "Hello"',
        'tuner generate recipe --prompt "Hello" --temperature 0.8 --top-p 0.95',
        "tuner generate my-model --file prompts.txt --compare base --json",
    ),
    "chat": (
        "tuner chat runs/recipe",
        'tuner chat my-model --system "Answer in one sentence." --temperature 0',
        "tuner chat recipe < questions.txt",
    ),
    "profile": (
        "tuner profile recipe.yaml",
        "tuner profile recipe.yaml --device h100-80g --processes 8",
        "tuner profile recipe.yaml --fit",
        "tuner profile recipe.yaml --fit --device rtx4090-24g",
        "tuner profile recipe.yaml --measure 3 --output report",
    ),
    "prove": (
        "tuner prove recipe.yaml",
        "tuner prove recipe.yaml --layouts fsdp2+tp2,sp4 --steps 5",
        "tuner prove recipe.yaml --parallel.tensor 4 --json",
    ),
    "config": ("tuner config check recipe.yaml", "tuner config show recipe.yaml --origin"),
    "config check": ("tuner config check recipe.yaml", "tuner config check recipe.yaml --optimizer.lr 3e-4"),
    "config show": ("tuner config show recipe.yaml --origin", "tuner config show recipe.yaml --plot-schedule"),
    "config schema": ("tuner config schema > recipe.schema.json",),
    "recipes": ("tuner recipes list", "tuner recipes copy smollm2_lora_cpu my.yaml"),
    "recipes list": ("tuner recipes list",),
    "recipes show": ("tuner recipes show smollm2_lora_cpu",),
    "recipes copy": ("tuner recipes copy smollm2_lora_cpu my.yaml",),
    "data": ("tuner data list", "tuner data gc --dry-run"),
    "doctor": ("tuner doctor", "tuner doctor --json"),
    "help": ("tuner help train", "tuner help optimizer", "tuner help optimizer.lr", "tuner help exit-codes"),
}
"""Two or three command lines of each command."""

MEANT: dict[str, str] = {
    **dict.fromkeys(("finetune", "fine-tune", "sft", "lora", "pretrain", "fit", "run", "start", "launch"), "train"),
    **dict.fromkeys(("dpo", "orpo", "kto", "simpo", "reward", "rm-train"), "train"),
    **dict.fromkeys(("continue",), "resume"),
    **dict.fromkeys(("preprocess", "tokenize", "prepare", "prep", "pack"), "prepare-data"),
    **dict.fromkeys(("merge", "merge-lora", "merge-adapter", "export", "convert", "save"), "export-hf"),
    **dict.fromkeys(("upload", "publish", "push-to-hub", "hub"), "push"),
    **dict.fromkeys(("inference", "infer", "predict", "sample", "complete"), "generate"),
    **dict.fromkeys(("talk", "repl", "interactive"), "chat"),
    **dict.fromkeys(("evaluate", "test", "validate", "perplexity"), "eval"),
    **dict.fromkeys(("memory", "estimate", "estimate-memory", "plan"), "profile"),
    **dict.fromkeys(("env", "info", "check", "diagnose", "status"), "doctor"),
    **dict.fromkeys(("new", "create", "wizard"), "init"),
    **dict.fromkeys(("ls", "list", "ps"), "runs list"),
    **dict.fromkeys(("show",), "runs show"),
    **dict.fromkeys(("diff",), "runs compare"),
    **dict.fromkeys(("lm-eval", "lm_eval", "benchmark", "score"), "eval"),
    **dict.fromkeys(("plot", "curves", "logs"), "runs plot"),
    **dict.fromkeys(("rm", "remove", "delete"), "runs rm"),
    **dict.fromkeys(("verify",), "runs verify"),
    **dict.fromkeys(("recipe", "templates"), "recipes"),
    **dict.fromkeys(("validate-config", "schema"), "config"),
}
"""What other tools, or people, call a command."""

NOT_HERE: dict[str, str] = {
    **dict.fromkeys(
        ("grpo", "ppo", "rl", "rlhf"),
        "not supported: there is no reinforcement learning; tuner train learns from preferences: method.kind: dpo",
    ),
    **dict.fromkeys(
        ("serve", "server", "api", "deploy"),
        "not supported: write a Hugging Face directory with tuner export-hf, which vLLM and others serve",
    ),
    **dict.fromkeys(
        ("quantize", "gguf", "awq", "gptq"),
        "not supported: write a Hugging Face directory with tuner export-hf, which llama.cpp and others convert",
    ),
    **dict.fromkeys(
        ("webui", "ui", "board"), "not supported: tuner runs plot writes a page; logging.trackers feeds TensorBoard"
    ),
}
"""What other tools do and this one does not, with what there is in place of it."""
