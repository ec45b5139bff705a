"""Exporting a checkpoint of several ranks, against DCP's Hugging Face writer and a plain write of the same bytes.

    python -m tools.bench_export DIRECTORY --rounds 3 [--gigabytes 2] [--ranks 4]

The first call writes the checkpoint (a llama of random float32 weights, cut over the ranks as training cuts it) into
DIRECTORY, which later calls use again; `--rounds 0` does no more than that. In every round follow each other, each in a
process of its own, with the page cache emptied before it and everything flushed to the disk inside the time:

raw      the bytes of the export, from memory, in blocks of 16 MiB, one after another
copy     the checkpoint's bytes read from the disk and written again, a thread reading ahead: what is left to any export
         on a disk that reads and writes at one speed
ours     the export's writing stage, from the checkpoint on the disk: reading, checking SHA-256, writing, hashing
dcp      `HuggingFaceStorageWriter` with consolidation, from the tensors in the memory of as many ranks
merge    the consolidation of that alone, from its sharded files on the disk (run by DCP's own function)

Then, for ours alone, the rest of an export: reading back what was written, and the comparison of logits. Prints
medians, ratios and the growth of memory (peak over the start) of each stage as JSON.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.commands import asked, one_of
from tools.measures import memory
from tuner.runtime.files import flush_tree

BLOCK_BYTES = 16 << 20
PROMPTS = ((5, 6, 7, 8), tuple(range(20, 60)))
THIS = [sys.executable, "-m", "tools.bench_export"]
CASES = ("raw", "copy", "ours", "dcp", "merge")


def config(gigabytes: float) -> Any:
    """A llama whose float32 weights have about so many bytes."""
    from transformers.models.llama import LlamaConfig

    hidden, vocabulary = 1024, 32000
    layer = 4 * hidden**2 + 3 * hidden * 4 * hidden
    layers = max(1, round((gigabytes * 1e9 / 4 - 2 * hidden * vocabulary) / layer))
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def write_checkpoint(directory: Path, gigabytes: float, ranks: int) -> None:
    """A run directory whose only checkpoint was saved by so many ranks, with the model's answers to two prompts."""
    import torch
    from transformers.models.llama import LlamaForCausalLM

    from tests.export.runs import write_tokenizer
    from tests.fixtures.processes import fork, wait
    from tuner.export.verify import last_logits

    torch.manual_seed(0)
    run = directory / "run"
    model = LlamaForCausalLM(config(gigabytes)).eval()
    model.config.save_pretrained(run / "model_config")
    model.generation_config.save_pretrained(run / "model_config")
    write_tokenizer(run / "tokenizer")
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in PROMPTS], batch_first=True)
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    probe = {"input_ids": padded, "lengths": lengths, "logits": last_logits(model, PROMPTS)}
    children = [fork(lambda rank=rank: save_rank(rank, ranks, directory, model, probe)) for rank in range(ranks)]  # type: ignore[misc]
    if [wait(child) for child in children] != [0] * ranks:
        raise SystemExit("the checkpoint could not be written")


@contextlib.contextmanager
def group(rank: int, ranks: int, meeting: Path) -> Iterator[Any]:
    """A gloo group; yields its device mesh."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{meeting}", timedelta(minutes=5), rank=rank, world_size=ranks)
    yield init_device_mesh("cpu", (ranks,))
    dist.destroy_process_group()


def save_rank(rank: int, ranks: int, directory: Path, model: Any, probe: Any) -> None:
    """Save this rank's rows of every parameter."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from tuner.checkpoint.save import CheckpointDir, save
    from tuner.runtime.files import file_entries

    facts = {"recipe": {"name": "bench", "model": {"dtype": "fp32"}}, "world_size": ranks, "adapter": None}
    facts |= {"model": {"name_or_path": "none", "init": "random"}, "frozen_hash": None}
    facts["tokenizer_files"] = file_entries(directory / "run" / "tokenizer")
    with group(rank, ranks, directory / "meeting") as mesh:
        tensors = {
            f"model/{name}": distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            for name, parameter in model.named_parameters()
        }
        save(CheckpointDir(directory / "run" / "checkpoints", "r"), 1, tensors, {"step": 1}, facts, probe)


@contextlib.contextmanager
def measured(figures: dict[str, float], name: str) -> Iterator[None]:
    """Note the block's seconds and how far memory rose above its start at the highest."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, started = memory("VmRSS"), time.perf_counter()
    yield
    figures[f"{name}_s"] = round(time.perf_counter() - started, 3)
    figures[f"{name}_mb"] = round((memory("VmHWM") - before) / 1e6, 1)


def raw(directory: Path, target: Path) -> dict[str, float]:
    """Write as many bytes as the export has."""
    import torch

    from tuner.export.outputs import ExportedValues, trained_skeleton
    from tuner.export.plan import ExportOptions, plan_export
    from tuner.export.tensors import OpenFiles

    plan = plan_export(directory / "run", target, ExportOptions("fp32"))
    with OpenFiles() as files:
        values = ExportedValues(plan.source, trained_skeleton(plan.source), files)
        left = sum(output.nbytes for output in values.merged(torch.float32))
    block, figures = memoryview(os.urandom(BLOCK_BYTES)), {"bytes": float(left)}
    with measured(figures, "raw"):
        target.mkdir()
        descriptor = os.open(target / "raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        while left:
            left -= os.write(descriptor, block[:left])
        os.fsync(descriptor)
        os.close(descriptor)
        flush_tree(target)
    return figures


def copy(directory: Path, target: Path) -> dict[str, float]:
    """Write what is read of the checkpoint's files."""
    from concurrent.futures import ThreadPoolExecutor

    paths = sorted((directory / "run" / "checkpoints" / "step-1").glob("rank-*"))
    figures: dict[str, float] = {}
    with measured(figures, "copy"), ThreadPoolExecutor(1) as reader:
        target.mkdir()
        blocks = (block for path in paths for block in read_blocks(path))
        descriptor = os.open(target / "copy", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        coming = reader.submit(next, blocks, b"")
        while block := coming.result():
            coming = reader.submit(next, blocks, b"")
            os.write(descriptor, block)
        os.fsync(descriptor)
        os.close(descriptor)
        flush_tree(target)
    return figures


def read_blocks(path: Path) -> Iterator[bytes]:
    """A file in blocks."""
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def ours(directory: Path, target: Path) -> dict[str, float]:
    """The stages of an export."""
    from tuner.export import hf, verify
    from tuner.export.outputs import trained_skeleton
    from tuner.export.plan import ExportOptions, plan_export
    from tuner.export.proof import prove
    from tuner.export.write import quiet

    figures: dict[str, float] = {}
    with quiet():
        plan = plan_export(directory / "run", target, ExportOptions("fp32"))
        trained = trained_skeleton(plan.source)
        target.mkdir()
        with measured(figures, "ours"):
            form = hf.form_of(plan, trained)
            outputs, written = hf.write_files(plan, target, trained, form)
            flush_tree(target)
        with measured(figures, "read_back"):
            verify.require_written(target, written, outputs)
        with measured(figures, "logits"):
            probes = hf.read_probes(plan.source)
            figures["difference"] = prove(plan, target, trained, probes, form).difference.absolute
    return figures


def dcp_rank(directory: Path, target: Path, rank: int, ranks: int) -> dict[str, float]:
    """Save by DCP's Hugging Face writer, with consolidation, what a rank of the checkpoint holds."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.tensor import Shard, distribute_tensor

    from tuner.checkpoint.open import open_checkpoint

    index = open_checkpoint(directory / "run" / "checkpoints" / "step-1", verify=False).index()
    figures: dict[str, float] = {}
    with group(rank, ranks, target.with_name("dcp-meeting")) as mesh:
        tensors = {
            name.removeprefix("model/"): distribute_tensor(
                torch.ones(entry.shape), mesh, [Shard(0)], src_data_rank=None
            )
            for name, entry in index.items()
        }
        writer = HuggingFaceStorageWriter(
            str(target), dict.fromkeys(tensors, 1), save_distributed=True, enable_consolidation=True
        )
        dist.barrier()
        with measured(figures, "dcp"):
            save(tensors, storage_writer=writer)
            dist.barrier()
            if rank == 0:
                flush_tree(target)
            dist.barrier()
    return figures


def dcp(directory: Path, target: Path, ranks: int) -> dict[str, float]:
    """DCP's writer in as many processes."""
    target.with_name("dcp-meeting").unlink(missing_ok=True)
    words = [*THIS, str(directory), "--case", "dcp", "--ranks", str(ranks), "--rank"]
    started = [subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE) for rank in range(ranks)]
    outs = [process.communicate()[0] for process in started]
    figures: dict[str, float] = json.loads(outs[0])
    return figures


def load_names(path: Path) -> list[str]:
    """The tensors of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def merge(target: Path) -> dict[str, float]:
    """Consolidate the sharded files that DCP's writer left."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    sharded = target.with_name("dcp") / "sharded"
    names = {name for path in sharded.glob("*.safetensors") for name in load_names(path)}
    figures: dict[str, float] = {}
    with measured(figures, "merge"):
        target.mkdir()
        consolidate_safetensors_files(str(sharded), str(target), dict.fromkeys(names, 1))
        flush_tree(target)
    return figures


def empty_caches() -> None:
    """Write out what is dirty and drop the page cache; needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")


def child(case: str, directory: Path, ranks: int) -> dict[str, float]:
    """One measurement in a process of its own."""
    target = directory / case
    if case != "merge":
        shutil.rmtree(target, ignore_errors=True)
    if case == "dcp":
        empty_caches()
        return dcp(directory, target, ranks)
    shutil.rmtree(target, ignore_errors=True)
    empty_caches()
    out = subprocess.run([*THIS, str(directory), "--case", case], stdout=subprocess.PIPE, check=True).stdout
    figures: dict[str, float] = json.loads(out)
    return figures


def benchmark(directory: Path, rounds: int, ranks: int) -> dict[str, Any]:
    """All cases in turn, so many times; medians, ratios and spread."""
    taken: dict[str, list[float]] = {}
    for number in range(rounds):
        for case in CASES if number % 2 == 0 else (*reversed(CASES[:3]), *CASES[3:]):
            for name, figure in child(case, directory, ranks).items():
                taken.setdefault(name, []).append(figure)
        print(json.dumps({"round": number + 1, **{name: values[-1] for name, values in taken.items()}}), flush=True)
    for case in CASES:
        shutil.rmtree(directory / case, ignore_errors=True)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    ratios = {
        f"{case}_over_ours": [round(a / b, 3) for a, b in zip(taken[f"{case}_s"], taken["ours_s"], strict=True)]
        for case in ("raw", "copy", "dcp", "merge")
    }
    return {"medians": medians, **{name: [statistics.median(r), min(r), max(r)] for name, r in ratios.items()}}


def main() -> None:
    """Measure, or be one of the measured processes."""
    options = asked(__doc__, {"directory": Path}, rounds=3, gigabytes=2.0, ranks=4, case=one_of(CASES), rank=int)
    directory: Path = options.directory.absolute()
    if options.case == "dcp":
        figures = dcp_rank(directory, directory / "dcp", options.rank, options.ranks)
        print(json.dumps(figures if options.rank == 0 else {}))
    elif options.case == "merge":
        print(json.dumps(merge(directory / "merge")))
    elif options.case:
        print(json.dumps({"raw": raw, "copy": copy, "ours": ours}[options.case](directory, directory / options.case)))
    else:
        if not (directory / "run" / "checkpoints" / "step-1").is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            write_checkpoint(directory, options.gigabytes, options.ranks)
        if options.rounds:
            print(json.dumps(benchmark(directory, options.rounds, options.ranks), indent=1))


if __name__ == "__main__":
    main()
