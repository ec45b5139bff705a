"""The faults that `tools/mutants.py` plants: file, exact old text, new text, and the tests that should see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One fault: `old`, which occurs once in `file`, becomes `new`; `tests` are what should then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str:
        """Why the fault does not apply to the tree at `root`; empty when it does."""
        path = root / self.file
        if not path.is_file():
            return "no file of this name"
        count = path.read_text(encoding="utf-8").count(self.old)
        if count != 1:
            return f"its text occurs {count} times"
        missing = [test for test in self.tests if not (root / test).exists()]
        return f"no tests at {missing[0]}" if missing else ""

    def apply(self, root: Path) -> None:
        """Plant the fault in the tree at `root`."""
        path = root / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new, 1), encoding="utf-8")


CONFIG = ("tests/config",)
RUNTIME = ("tests/runtime",)
CHECKPOINT = ("tests/checkpoint",)
BATCHES = ("tests/data/test_batches.py",)
MASKS = ("tests/data/encoding/test_masks.py",)
AS_LOADED = ("tests/data/encoding/test_as_loaded.py",)
SKELETONS = ("tests/data/encoding/test_skeleton.py",)
FAST = ("tests/data/encoding/test_fast.py",)
PREPARE = ("tests/data/building/test_changed.py",)
MODEL = ("tests/model",)
TRAIN = ("tests/train",)
RANKS = ("tests/multi",)
PROFILE = ("tests/profile",)
EXPORT = ("tests/export",)
FAULTS = ("tests/faults/test_saves.py",)
NATIVE = ("tests/model/native",)

MUTANTS: tuple[Mutant, ...] = (
    # What the user wants.
    Mutant(
        "config-percent",
        "tuner/config/numbers.py",
        "return number / 100",
        "return number / 10",
        CONFIG,
    ),
    Mutant(
        "config-micro-batch-rule",
        "tuner/config/rules.py",
        "train.global_batch_size % train.micro_batch_size == 0",
        "train.global_batch_size >= train.micro_batch_size",
        CONFIG,
    ),
    Mutant(
        "config-duplicate-key",
        "tuner/config/yaml.py",
        "            if key.value in children:\n",
        "            if key.value in children and event.start_mark.column > 0:\n",
        (*CONFIG, "tests/contracts/test_bad_input.py"),
    ),
    Mutant(
        "config-column",
        "tuner/config/yaml.py",
        "{event.start_mark.column + 1}",
        "{event.start_mark.column}",
        CONFIG,
    ),
    # The machine.
    Mutant(
        "runtime-new-file-fsync",
        "tuner/runtime/files.py",
        "            write_all(descriptor, data)\n            os.fsync(descriptor)\n",
        "            write_all(descriptor, data)\n",
        RUNTIME,
    ),
    Mutant(
        "runtime-publish-parent-fsync",
        "tuner/runtime/files.py",
        "        os.rename(tmp, final)\n        fsync_dir(final.parent)\n",
        "        os.rename(tmp, final)\n",
        RUNTIME,
    ),
    Mutant(
        "runtime-discard-in-place",
        "tuner/runtime/files.py",
        "        os.rename(path, trash)\n        fsync_dir(path.parent)\n        shutil.rmtree(trash)\n",
        "        shutil.rmtree(path)\n",
        FAULTS,
    ),
    # What the quick tier of the fault campaign must see.
    Mutant(
        "faults-nothing-is-flushed",
        "tuner/runtime/files.py",
        'TMP_PREFIX = ".tmp-"\n',
        'os.fsync = lambda descriptor: None\nTMP_PREFIX = ".tmp-"\n',
        FAULTS,
    ),
    Mutant(
        "faults-directories-unflushed",
        "tuner/runtime/files.py",
        "    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)\n    try:\n        os.fsync(descriptor)\n",
        "    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)\n    try:\n        pass\n",
        FAULTS,
    ),
    Mutant(
        "faults-named-before-described",
        "tuner/checkpoint/save.py",
        '    write_new(tmp / MANIFEST_NAME, json_bytes(sealed({**manifest, "files": files})))\n'
        "    if os.path.lexists(final):\n        replace_dir(tmp, final)\n    else:\n        publish_dir(tmp, final)\n",
        "    publish_dir(tmp, final)\n"
        '    write_new(final / MANIFEST_NAME, json_bytes(sealed({**manifest, "files": files})))\n',
        FAULTS,
    ),
    Mutant(
        "faults-swallowed-by-writer-threads",
        "tuner/checkpoint/storage.py",
        "            digest, of_chunks = _write_file(path, header, tensors, spans)\n"
        "            fsync_dir(self.directory)\n",
        "            with ThreadPoolExecutor(2) as pool:\n"
        "                job = pool.submit(_write_file, path, header, tensors, spans)\n"
        "                pool.submit(fsync_dir, self.directory)\n"
        "            digest, of_chunks = ('', [''] * len(items)) if job.exception() else job.result()\n",
        FAULTS,
    ),
    Mutant(
        "runtime-shared-lock",
        "tuner/runtime/lock.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        RUNTIME,
    ),
    # State on disk.
    Mutant(
        "checkpoint-header-unhashed",
        "tuner/checkpoint/hashes.py",
        "    for block in header:\n        digest.update(block)\n",
        "",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-box-offset",
        "tuner/checkpoint/storage.py",
        "chunk.start + row_start * row_bytes",
        "chunk.start",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-unverified",
        "tuner/checkpoint/manifest.py",
        "if name not in of_ranks}, hash=verify)",
        "if name not in of_ranks}, hash=False)",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-shard-unverified",
        "tuner/checkpoint/hashes.py",
        "if found != chunk.sha256:",
        "if False:",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-copy-unused",
        "tuner/checkpoint/save.py",
        "if self._staged is None else",
        "if True else",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-save-not-waited-for",
        "tuner/run/loop.py",
        "    session.settle_save()\n",
        "",
        ("tests/run/tasks/test_save.py",),
    ),
    Mutant(
        "checkpoint-oldest-first",
        "tuner/checkpoint/steps.py",
        "return sorted(found, reverse=True)",
        "return sorted(found)",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-keep-one-more",
        "tuner/checkpoint/prune.py",
        "if kept >= keep:",
        "if kept > keep:",
        CHECKPOINT,
    ),
    # Rows to batches.
    Mutant(
        "data-target-across-documents",
        "tuner/data/batches.py",
        "    targets[ends - 1] = IGNORED\n",
        "    targets[-1] = IGNORED\n",
        BATCHES,
    ),
    Mutant(
        "data-mask-dropped",
        "tuner/data/batches.py",
        "np.where(trained[1:], input_ids[1:], IGNORED)",
        "input_ids[1:]",
        BATCHES,
    ),
    Mutant(
        "data-mask-shifted",
        "tuner/data/batches.py",
        "np.where(trained[1:], input_ids[1:], IGNORED)",
        "np.where(trained[:-1], input_ids[1:], IGNORED)",
        BATCHES,
    ),
    Mutant(
        "data-positions-run-on",
        "tuner/data/batches.py",
        " - np.repeat(ends - lengths, lengths)",
        "",
        BATCHES,
    ),
    Mutant(
        "data-same-order-every-epoch",
        "tuner/data/order.py",
        "[seed & _MASK64, epoch]",
        "[seed & _MASK64, 0]",
        BATCHES,
    ),
    Mutant(
        "data-count-of-all-tokens",
        "tuner/data/batches.py",
        "self._rows.trained_per_row[row_ids].sum()",
        "self._rows.tokens_per_row[row_ids].sum()",
        BATCHES + TRAIN,
    ),
    Mutant(
        "data-filler-trains",
        "tuner/data/batches.py",
        "return without_targets(collate([self._rows.row(filler)]))",
        "return collate([self._rows.row(filler)])",
        BATCHES,
    ),
    Mutant(
        "data-end-of-turn-untrained",
        "tuner/data/encoding/tokenizer.py",
        "return None if found is None else found.end()",
        "return None if found is None else found.start()",
        MASKS,
    ),
    Mutant(
        "data-answer-starts-without-prompt",
        "tuner/data/encoding/chat.py",
        "header and self.text.startswith(header, at)",
        "header in self.text",
        MASKS,
    ),
    Mutant(
        "data-ids-of-the-file-alone",
        "tuner/transformers_tokenizer.py",
        "    if changed != []:\n",
        "    if changed is None:\n",
        AS_LOADED,
    ),
    Mutant(
        "data-special-tokens-undeclared",
        "tuner/transformers_tokenizer.py",
        "    if declared_special_tokens(config, parse_json(files, SPECIAL_MAP)) == wanted:\n",
        "    if wanted:\n",
        AS_LOADED,
    ),
    Mutant(
        "export-ids-unchecked",
        "tuner/export/tokenizer_check.py",
        "        if key in probe and ids != probe[key]:\n",
        "        if ids is None:\n",
        ("tests/export/test_tokenizer_ids.py",),
    ),
    Mutant(
        "data-probe-literal-unseen",
        "tuner/data/encoding/skeleton.py",
        "                if literal in content:\n                    return False\n",
        "                if literal == content:\n                    return False\n",
        SKELETONS,
    ),
    Mutant(
        "data-probe-length-unseen",
        "tuner/data/encoding/probe.py",
        "    def __len__(self) -> int:\n        self.asked.too_much = True\n",
        "    def __len__(self) -> int:\n",
        SKELETONS,
    ),
    Mutant(
        "data-control-token-in-known-shape",
        "tuner/data/encoding/encode.py",
        "(flat.counts(self._is_special) != expected)",
        "(flat.counts(self._is_special) < expected)",
        MASKS + FAST,
    ),
    Mutant(
        "data-straddled-turn-kept",
        "tuner/data/encoding/encode.py",
        "        doubtful[turns.row[turns.straddles]] = True\n",
        "",
        MASKS,
    ),
    Mutant(
        "data-fast-encoder-unproven",
        "tuner/data/encoding/proven.py",
        "            if not np.array_equal(given[given < self._table.size], own):\n",
        "            if own is None:\n",
        FAST,
    ),
    Mutant(
        "data-characters-not-looked-at",
        "tuner/data/encoding/proven.py",
        "                self._refuted.add(c)\n",
        "                continue\n",
        FAST,
    ),
    Mutant(
        "data-sample-not-judged",
        "tuner/data/encoding/encode.py",
        "        self._check(examples, merged, checks)\n",
        "",
        FAST,
    ),
    Mutant(
        "data-unknown-bytes-kept",
        "tuner/data/encoding/encode.py",
        "flat.counts(self._is_unknown) > 0 if self._is_unknown.any() else flat.unknown",
        "flat.unknown",
        FAST,
    ),
    Mutant(
        "data-frame-untrained-end",
        "tuner/data/encoding/encode.py",
        "(offsets[1:][framed] - len(suffix) + k, token, True)",
        "(offsets[1:][framed] - len(suffix) + k, token, False)",
        MASKS + FAST,
    ),
    Mutant(
        "data-duplicate-keys-unseen",
        "tuner/data/reading/jsonl.py",
        'spare = raw.count(b":") - keys',
        "spare = 0",
        ("tests/data/reading/test_jsonl.py",),
    ),
    Mutant(
        "data-lines-of-blocks-uncounted",
        "tuner/data/building/documents.py",
        "                lines += block.lines\n",
        "",
        PREPARE,
    ),
    Mutant(
        "data-orders-not-waited-for",
        "tuner/data/building/workers.py",
        "        while running.are_ordered():\n            running.receive()\n",
        "",
        ("tests/data/building/test_workers.py",),
    ),
    Mutant(
        "data-hash-ahead-of-what-is-written",
        "tuner/data/building/stream_file.py",
        "while self._open and self._open[0][0] in self._filled:",
        "if self._open:",
        ("tests/data/building/test_stream_file.py",),
    ),
    Mutant(
        "data-digest-without-order",
        "tuner/data/reading/sources.py",
        'hashlib.sha256(b"".join(digests))',
        'hashlib.sha256(b"".join(sorted(digests)))',
        ("tests/data/reading/test_sources.py",),
    ),
    Mutant(
        "data-share-is-the-beginning",
        "tuner/data/building/selection.py",
        'taken[np.argsort(words, kind="stable")[:rest]] += 1',
        "taken[:rest] += 1",
        ("tests/data/building/test_selection.py",),
    ),
    Mutant(
        "data-equal-documents-on-both-sides",
        "tuner/data/building/selection.py",
        "    held[order] = np.repeat(chosen, sizes)\n",
        "    held[order[np.cumsum(sizes) - sizes]] = chosen\n",
        ("tests/data/building/test_selection.py",),
    ),
    Mutant(
        "data-field-not-in-key",
        "tuner/data/building/keys.py",
        '        "special_tokens_in_text": request.special_tokens_in_text,\n',
        "",
        ("tests/data/building/test_keys.py",),
    ),
    Mutant(
        "data-damage-unseen",
        "tuner/data/building/cache.py",
        '        verify_entries(path, manifest["files"], hash=False)\n',
        "",
        ("tests/data/building/test_cache.py",),
    ),
    Mutant(
        "data-micro-batches-by-chance",
        "tuner/data/deal.py",
        "by_cost = sorted(range(n_cells), key=lambda cell: -loads[cell])",
        "by_cost = list(range(n_cells))",
        ("tests/data/test_deal.py",),
    ),
    Mutant(
        "data-first-token-counted",
        "tuner/data/building/pack.py",
        "offsets[document] + start + 1, offsets[-1]",
        "offsets[document] + start, offsets[-1]",
        ("tests/data/building/test_pack.py",),
    ),
    # The model.
    Mutant(
        "model-window-one-wider",
        "tuner/model/attention.py",
        "allowed & (distance < window)",
        "allowed & (distance <= window)",
        MODEL,
    ),
    Mutant(
        "model-documents-see-each-other",
        "tuner/model/documents.py",
        "[0, *accumulate(lengths)]",
        "[0, sum(lengths)]",
        MODEL,
    ),
    Mutant(
        "model-gradient-sign",
        "tuner/model/linear_cross_entropy.py",
        "share.new_full(wanted.shape, -1.0)",
        "share.new_full(wanted.shape, 1.0)",
        MODEL,
    ),
    Mutant(
        "model-last-chunk-alone",
        "tuner/model/linear_cross_entropy.py",
        "if span.start == 0 else",
        "if True else",
        MODEL,
    ),
    Mutant(
        "model-missing-weights-pass",
        "tuner/model/build.py",
        "    _require_complete(spec, report)\n",
        "",
        MODEL,
    ),
    Mutant(
        "model-adapter-in-base-type",
        "tuner/model/adapter.py",
        "parameter.data = parameter.data.float()",
        "parameter.data = parameter.data.clone()",
        MODEL,
    ),
    # The same model over processes.
    Mutant(
        "parallel-gradients-averaged",
        "tuner/parallel/fsdp.py",
        "            module.set_gradient_divide_factor(1.0)\n",
        "",
        RANKS,
    ),
    Mutant(
        "parallel-buffers-left-out",
        "tuner/parallel/fsdp.py",
        "return [*root.named_parameters(), *root.named_buffers()]",
        "return [*root.named_parameters()]",
        RANKS,
    ),
    # One optimizer step at a time.
    Mutant(
        "train-normalised-per-microbatch",
        "tuner/train/step.py",
        "(loss / max(1, batches.trained_count)).backward()",
        "(loss / max(1, len(batch.trained_positions))).backward()",
        TRAIN,
    ),
    Mutant(
        "train-no-clipping",
        "tuner/train/step.py",
        "state.optimizer.step(skip, divisor)",
        "state.optimizer.step(skip)",
        TRAIN,
    ),
    Mutant(
        "train-guard-reopens",
        "tuner/train/guard.py",
        "skip = bad | shut",
        "skip = bad",
        TRAIN,
    ),
    Mutant(
        "train-spikes-from-half-a-window",
        "tuner/train/guard.py",
        "if self._judged >= WINDOW:",
        "if self._judged >= WINDOW // 2:",
        TRAIN,
    ),
    Mutant(
        "train-feed-swallows-the-next",
        "tuner/train/prefetcher.py",
        "        self._ahead = None\n",
        "        self._ahead = current\n",
        TRAIN,
    ),
    Mutant(
        "train-dropout-repeats",
        "tuner/train/step.py",
        "_mixed(step_config.seed, index - state.rng_start, number, step_config.rank)",
        "_mixed(step_config.seed, number, step_config.rank)",
        TRAIN,
    ),
    Mutant(
        "train-schedule-one-late",
        "tuner/run/loop.py",
        "table.schedule.factor(index + 1)",
        "table.schedule.factor(index)",
        TRAIN,
    ),
    Mutant(
        "train-decay-on-norms",
        "tuner/train/optimizer.py",
        "decay if is_matrix(name, parameter) else 0.0",
        "decay",
        TRAIN,
    ),
    Mutant(
        "train-resume-forgets-updates",
        "tuner/run/progress.py",
        "    assembly.train_state.optimizer.set_step_count(updates_of(state) - starts_of(progress.resets).updates)\n",
        "",
        TRAIN,
    ),
    Mutant(
        "train-reset-forgotten",
        "tuner/run/resets.py",
        "    known = resets_of(found.state if record is None else record)\n",
        "    known = resets_of(found.state)\n",
        ("tests/run/test_resets.py",),
    ),
    # What it costs.
    Mutant(
        "profile-frees-forgotten",
        "tuner/profile/events.py",
        "            ended.freed = len(self._changes)\n",
        "            pass\n",
        PROFILE,
    ),
    # The way out.
    Mutant(
        "generate-prompt-token-in-answer",
        "tuner/generate.py",
        "output[0, len(ids) :]",
        "output[0, len(ids) - 1 :]",
        ("tests/test_generate.py",),
    ),
    Mutant(
        "export-merge-sign",
        "tuner/export/merged.py",
        ".float() + delta * adapter.scale",
        ".float() - delta * adapter.scale",
        EXPORT,
    ),
    Mutant(
        "export-damage-unseen",
        "tuner/export/rows.py",
        "and digest.hexdigest() != chunk.sha256",
        "and not digest.hexdigest()",
        EXPORT,
    ),
    Mutant(
        "export-first-rows-again",
        "tuner/export/rows.py",
        "at = (first - chunk.offsets[0]) * (chunk.length // chunk.sizes[0]) if self.shape else 0",
        "at = 0",
        EXPORT,
    ),
    Mutant(
        "export-any-logits-pass",
        "tuner/export/verify.py",
        "not difference.relative <= relative",
        "difference.relative < 0",
        EXPORT,
    ),
    Mutant(
        "export-written-bytes-unchecked",
        "tuner/export/verify.py",
        "sha256_of_same(path, written[path.name].pieces) if path.name in written else None",
        '__import__("hashlib").sha256(path.read_bytes()).hexdigest()',
        EXPORT,
    ),
    Mutant(
        "native-window-off-by-one",
        "tuner/model/native/attention.c",
        "query - window + 1 > key ? query - window + 1 - key : 0",
        "query - window > key ? query - window - key : 0",
        NATIVE,
    ),
    Mutant(
        "native-fade-forgotten",
        "tuner/model/native/attention.c",
        "total[i] = total[i] * fade + sum_of(sums);",
        "total[i] = total[i] + sum_of(sums);",
        NATIVE,
    ),
    Mutant(
        "native-no-number-hidden",
        "tuner/model/native/vector.h",
        "pick(x < -126.0f, (vec){0}, x)",
        "(vec){0}",
        NATIVE,
    ),
    Mutant(
        "native-target-kept",
        "tuner/model/native/cross_entropy.c",
        "if (at == block) gradient[target - block] -= 1.0f;",
        "",
        NATIVE,
    ),
    Mutant(
        "native-norm-without-mean",
        "tuner/model/native/rms_norm.c",
        "* inverse * inverse;",
        "* inverse;",
        NATIVE,
    ),
    Mutant(
        "native-rotation-not-back",
        "tuner/model/native/rotary.c",
        "if (r->back) {",
        "if (0) {",
        NATIVE,
    ),
    Mutant(
        "native-gate-slope",
        "tuner/model/native/swiglu.c",
        "gate * (1.0f - share)",
        "gate * share",
        NATIVE,
    ),
)
