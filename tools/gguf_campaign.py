"""Every family that GGUF files are written of, asked in llama.cpp at length: texts, chats, answers, and every type.

    python -m tools.gguf_campaign ASSETS --out .demo/campaigns/gguf.jsonl [--archs llama smollm2 ...] [--server PROGRAM]

A tiny model of each family gets the tokenizer of a real one; `smollm2` is the model of .demo. At f32, by `tuner
export-gguf`'s own proof and then at length: ids of texts (published ones, code, numbers, white space, emoji, all
scripts, long lines, added tokens inside) bare and framed, chats as rendered, the likeliest 64 tokens along answers, and
answers of 64 tokens. (A third of the chats has a system message, which some templates refuse; what the proof does not
ask is left out.) Then the KL of four types, of a model whose rows fill the blocks of K-quants. A line of a family and
type is added to the file as it ends; what is there is not done again. Exits with 1 where something differs that the
page does not name. ASSETS is filled by `tools/fetch_assets.py ASSETS --campaign`. The wheel reads GELU off a table of
float16: with a `llama-server` that computes it (tools/llama_binary.py says how it is built) the families with GELU are
asked at f32 once more, held against transformers' own.
"""

import itertools
import json
import random
import shutil
import sys
import sysconfig
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.export.gguf_models import FAMILIES, write_model
from tools.commands import ROOT, Results, asked, one_line, workplace
from tools.tokenizer_campaign import chats
from tools.tokenizer_families import FAMILIES as TOKENIZERS
from tools.tokenizer_families import write_family
from tuner.errors import TunerError
from tuner.export.gguf import architecture, engine, export
from tuner.export.gguf.architecture import Architecture
from tuner.export.gguf.export import export_gguf
from tuner.export.gguf.source import GgufSource, source_of
from tuner.export.gguf.vocabulary import is_alike
from tuner.export.source import TRAINED

OF = {
    "llama": "Llama 3", "mistral": "Mistral 7B v0.3", "qwen2": "Qwen3", "qwen3": "Qwen3", "qwen3_moe": "Qwen3",
    "olmo2": "GPT-2", "phi3": "Phi-3", "granite": "GPT-2", "smollm3": "Llama 3", "gemma2": "Gemma",
    "gemma3_text": "Gemma 3", "gpt_oss": "gpt-oss", "lfm2": "SmolLM2",
}  # fmt: skip
"""Whose tokenizer a family's tiny model gets."""
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 64,
    "query_pre_attn_scalar": 64,
}  # fmt: skip
"""Rows that fill blocks of 256."""
SMOLLM2 = ROOT / ".demo" / "smollm2"
KINDS = ("bf16", "q8_0", "q4_0", "q4_k_m")
COMPUTED = "f32 computed"
"""At f32, of a family with GELU: by a llama.cpp that computes it, against a model that does."""
GELU = ("gemma2", "gemma3_text")
PROMPTS, ANSWER, SHOWN = 4, 64, 5
_EMOJI = "🙂🙃👩‍👩‍👧‍👦🇩🇪✅👍🏽🏳️‍🌈⚠️❤️‍🔥"
_SPACES = (" ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "    ", "\u00a0", "\u3000")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def published(assets: Path) -> list[str]:
    """Texts of the assets and of Python's library, a paragraph or a piece of a file each."""
    at = assets / "llamafactory"
    found = [m["content"] for chat in chats(assets, 4000) for m in chat]
    found += [json.loads(line)["text"] for line in (at / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()]
    found += (at / "wiki_demo.txt").read_text(encoding="utf-8").split("\n\n")
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        code = path.read_text(encoding="utf-8")
        found += [code[start : start + 700] for start in range(0, min(len(code), 14_000), 700)]
    return found


def made(draw: random.Random, pieces: Sequence[str], added: Sequence[str]) -> Iterator[str]:
    """Hard ones without end: all scripts, numbers, white space, emoji, long lines, added tokens inside."""
    letters = [chr(c) for c in range(33, 0x2FFFF) if unicodedata.category(chr(c))[0] in "LMNPS"]
    low = sum(letter < "\u3000" for letter in letters)

    def written_in_one_script() -> str:
        at = draw.randrange(low)
        return "".join(draw.choices(letters[at : at + 40], k=draw.randint(1, 20)))

    kinds: tuple[Callable[[], str], ...] = (
        lambda: "".join(draw.choices(letters, k=draw.randint(1, 40))),
        written_in_one_script,
        lambda: str(draw.choice([draw.randint(0, 10 ** draw.randint(1, 30)), draw.uniform(-1e6, 1e6)])),
        lambda: "".join(draw.choices(_SPACES, k=draw.randint(1, 12))),
        lambda: "".join(draw.choices(_EMOJI, k=draw.randint(1, 8))),
        lambda: draw.choice(pieces)[:60],
        lambda: draw.choice(pieces)[:6] * draw.randint(20, 200),
        lambda: draw.choice(added or [""]),
    )
    weights = (2, 2, 2, 2, 1, 4, 0.2, 2)
    while True:
        yield "".join(make() for make in draw.choices(kinds, weights, k=draw.randint(1, 8)))


def written(family: str, assets: Path, directory: Path) -> Path:
    """A Hugging Face directory of the family."""
    if family == "smollm2":
        return Path(shutil.copytree(SMOLLM2, directory))
    if OF[family] == "SmolLM2":
        tokenizer = SMOLLM2
    else:
        tokenizer = directory / "tokenizer"
        (of,) = (each for each in TOKENIZERS if each.name == OF[family])
        write_family(of, assets, tokenizer, list)
    auto: Any = AutoTokenizer
    loaded = auto.from_pretrained(tokenizer)
    if not loaded.chat_template:
        loaded.chat_template = _TEMPLATE
    if family == "phi3":  # of these, too, Phi 3's own take the spaces after them, and do not
        ends = {"</s>": True, "<|endoftext|>": False}
        own = [AddedToken(name, rstrip=takes, normalized=False) for name, takes in ends.items()]
        loaded.backend_tokenizer.add_special_tokens(own)
    size = -(-len(loaded) // 64) * 64
    ids = {name: getattr(loaded, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)

    def decided(model: Any) -> None:
        """Among so many tokens the likeliest would be a matter of rounding; with tied embeddings, never in doubt."""
        model.lm_head.weight.mul_(0.3 if model.config.tie_word_embeddings else 4)

    with torch.no_grad():
        write_model(directory, family, decided, vocab_size=size, **ids)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).unlink(missing_ok=True)
    loaded.save_pretrained(directory)
    return directory


@torch.no_grad()
def in_doubt(model: Any) -> None:
    """With tied embeddings a small model is certain of what follows, whatever its weights are rounded to."""
    model.lm_head.weight.mul_(0.05 if model.config.tie_word_embeddings else 1)


def texts_of(tokenizer: Any, assets: Path, count: int) -> list[str]:
    """Half of them published ones; composed characters alone, as llama.cpp normalises nothing."""
    draw = random.Random(1)
    real = published(assets)
    draw.shuffle(real)
    added = sorted(token.content for token in tokenizer.added_tokens_decoder.values())
    hard = made(draw, real, added)
    mixed = real[: count // 2]
    mixed += [next(hard) for _ in range(count - len(mixed))]
    return [unicodedata.normalize("NFC", text) for text in mixed]


def at_length(source: GgufSource, file: Path, assets: Path, texts: int, chats_: int) -> dict[str, Any]:
    """What llama.cpp says of the texts and chats, and of answers, against transformers."""
    tokenizer = AutoTokenizer.from_pretrained(source.place)
    all_texts = texts_of(tokenizer, assets, texts)
    recorded: list[dict[str, Any]] = [{"text": text} for text in all_texts]
    talks = chats(assets, 2 * chats_)[-chats_:]
    system = {"role": "system", "content": "Be brief. "}
    recorded += [{"text": "", "messages": [*([system] if n % 3 == 0 else []), *talk]} for n, talk in enumerate(talks)]
    wanted = export.texts_of(tokenizer, recorded, [], source.place)
    model = Architecture.of(source.config).computed(source.reference())
    prompts = [ids[:48] for ids, _ in wanted.ids[:200] if len(ids) >= 48][:PROMPTS]  # noqa: PLR2004 - tokens
    asks = export.Prompts(prompts, model, 256)
    answers = export.answers_of(file, wanted, asks, ANSWER)
    other = [text for text, one, two in zip(wanted.texts, wanted.ids, answers.ids, strict=True) if one != two]
    named = [text for text in other if is_named(tokenizer, text)]
    other = [text for text in other if text not in named]
    spoken = zip(wanted.rendered, answers.rendered, strict=True)
    wrong = [text for text, said in spoken if said not in {text, text.removeprefix(wanted.bos)}]
    wrong += [text for text, one, two in zip(wanted.rendered, wanted.talks, answers.talks, strict=True) if one != two]
    same = 0
    for prompt, (answer, _) in zip(prompts, answers.continued, strict=True):
        logs = asks.log_probabilities(prompt, answer)[: len(answer)]
        chosen = logs.gather(1, torch.tensor(answer)[:, None])[:, 0]
        same += bool((chosen >= logs.max(-1).values - export.TIE).all())
    figures = export.measured(wanted, asks, answers)
    return {
        "texts": len(wanted.texts), "other_ids": len(other), "named": len(named), "chats": len(wanted.rendered),
        "other_chats": len(wrong), "answers": len(prompts), "same_answers": same, "tokens": figures.tokens,
        "nats": figures.difference, "steps": figures.steps,
        "examples": [repr(text[:160]) for text in (other + wrong)[:SHOWN]],
    }  # fmt: skip


def is_named(tokenizer: Any, text: str) -> bool:
    """Whether the page says that llama.cpp may encode a text otherwise.

    Wide spaces that a token takes; of gpt-oss's tokenizer, capitals after small letters that are not Latin.
    """
    pairs = ((a, b) for a, b in itertools.pairwise(text) if not a.isascii() or not b.isascii())
    mixed = any(unicodedata.category(a) == "Ll" and unicodedata.category(b) in {"Lu", "Lt"} for a, b in pairs)
    return not is_alike(tokenizer, text) or (mixed and "<|return|>" in tokenizer.get_vocab())


def lines(
    family: str, kinds: Sequence[str], assets: Path, work: Path, counts: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    """A line of f32, with a real tokenizer, and of each type, with a small one but of SmolLM2."""
    export.N_TEXTS = 40  # others are asked below
    for kind in kinds:
        started, row = time.monotonic(), dict[str, Any](arch=family, type=kind)
        file, place = work / f"{kind}.gguf", work / kind
        is_small = kind in KINDS and family != "smollm2"
        model = write_model(place, family, in_doubt, **WIDE) if is_small else written(family, assets, place)
        try:
            source = source_of(model, print, "newest", TRAINED)
            report = export_gguf(source, kind.removesuffix(" computed"), file)
            if report.exact is None or report.figures is None:
                raise RuntimeError("not verified")
            row |= {"exact": report.exact.difference, "kl": report.figures.kl, "same": report.figures.greedy}
            row |= {"of": report.figures.tokens, "exact_steps": report.exact.steps}
            if kind not in KINDS:
                row |= at_length(source, file, assets, *counts)
        except (TunerError, RuntimeError) as error:
            row["error"] = one_line(error)
        file.unlink(missing_ok=True)
        yield row | {"seconds": round(time.monotonic() - started, 1)}


def holds(row: Mapping[str, Any]) -> bool:
    """Whether a line is as it must be."""
    if "error" in row:
        return False
    if row["type"] in KINDS:
        return True
    bound = export.BOUND + (export.STEPS * row["steps"] if row["type"] == "f32" else 0)
    is_close = row["nats"] <= bound and row["same_answers"] == row["answers"]
    return not row["other_ids"] and not row["other_chats"] and bool(is_close)


def main() -> int:
    """Ask every family that is wanted."""
    options = asked(
        __doc__, {"assets": Path}, out={"type": Path, "required": True}, archs=[*FAMILIES, "smollm2"], texts=10_000,
        chats=2_200, server=(Path, "a llama-server that computes GELU"),
    )
    torch.set_num_threads(1)
    results = Results(options.out)
    done = {(row["arch"], row["type"]) for row in results.rows}
    for family in options.archs:
        counts = (options.texts, options.chats)
        kinds = [kind for kind in ("f32", *KINDS) if (family, kind) not in done]
        with workplace() as work:
            for row in lines(family, kinds, options.assets.resolve(), work, counts):
                results.add(row)
        if options.server and family in GELU and (family, COMPUTED) not in done:
            server, computes = ("-m", "tools.llama_binary", str(options.server.resolve())), lambda model: model
            with (
                workplace() as work, patch.object(engine, "SERVER", server),
                patch.object(architecture, "read_off_a_table", computes),
            ):  # fmt: skip
                for row in lines(family, [COMPUTED], options.assets.resolve(), work, counts):
                    results.add(row)
    wrong = [row for row in results.rows if not holds(row)]
    for row in wrong:
        print(f"DIFFERS {row['arch']} {row['type']}: {row.get('error') or row['examples']}")
    print(f"{len(results.rows)} lines, {len(wrong)} differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
