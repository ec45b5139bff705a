"""The faults that `tools/mutants.py` plants: place, pattern, what replaces it, and the tests that should see it."""

from __future__ import annotations

from tools.mutations import InC, Mutant

CONFIG = ("tests/config",)
RUNTIME = ("tests/runtime",)
CHECKPOINT = ("tests/checkpoint",)
BATCHES = ("tests/data/test_batches.py",)
MASKS = ("tests/data/encoding/test_masks.py",)
AS_LOADED = ("tests/data/encoding/test_as_loaded.py",)
SKELETONS = ("tests/data/encoding/test_template_layout.py",)
FAST = ("tests/data/encoding/test_fast.py",)
PREPARE = ("tests/data/building/test_changed.py",)
MODEL = ("tests/model",)
TRAIN = ("tests/train",)
RANKS = ("tests/parallel",)
PROFILE = ("tests/profile",)
EXPORT = ("tests/export",)
FAULTS = ("tests/faults/test_saves.py",)
NATIVE = ("tests/model/native",)

MUTANTS: tuple[Mutant, ...] = (
    # What the user wants.
    Mutant(
        "config-percent",
        "config.numbers._parse",
        "A / 100",
        "A / 10",
        CONFIG,
    ),
    Mutant(
        "config-micro-batch-rule",
        "config.rules._micro_divides_global",
        "A.global_batch_size % A.micro_batch_size == 0",
        "A.global_batch_size >= A.micro_batch_size",
        CONFIG,
    ),
    Mutant(
        "config-duplicate-key",
        "config.yaml._Builder._mapping",
        "A.value in B",
        "A.value in B and A.start_mark.column > 0",
        (*CONFIG, "tests/contracts/test_bad_input.py"),
    ),
    Mutant(
        "config-column",
        "config.yaml._Builder._where",
        "A.start_mark.column + 1",
        "A.start_mark.column",
        CONFIG,
    ),
    Mutant(
        "config-share-percent",
        "config.duration.bare_number",
        "write_number(A * 100)",
        "write_number(A * 10)",
        CONFIG,
    ),
    Mutant(
        "config-near-names",
        "config.advice._nearest",
        "get_close_matches(A, B, 1, C)",
        "get_close_matches(A, B, 1, 0.3)",
        CONFIG,
    ),
    Mutant(
        "config-import-batch",
        "config.imported._settle",
        "int(A * B * C)",
        "int(A * B)",
        CONFIG,
    ),
    Mutant(
        "setup-check-patterns",
        "setup.check_model._select_each",
        "select([A], B, C)",
        "select([], B, C)",
        ("tests/tools/test_flawed_recipes.py",),
    ),
    # The machine.
    Mutant(
        "runtime-new-file-fsync",
        "runtime.files.write_new",
        "os.fsync(A)",
        "",
        RUNTIME,
    ),
    Mutant(
        "runtime-publish-parent-fsync",
        "runtime.files.publish_dir",
        "os.rename(A, B)\n"
        "fsync_dir(B.parent)",
        "os.rename(A, B)",
        RUNTIME,
    ),
    Mutant(
        "runtime-discard-in-place",
        "runtime.files.discard_dir",
        "os.rename(A, B)\n"
        "fsync_dir(A.parent)\n"
        "shutil.rmtree(B)",
        "shutil.rmtree(A)",
        FAULTS,
    ),
    # What the quick tier of the fault campaign must see.
    Mutant(
        "faults-nothing-is-flushed",
        "runtime.files",
        "TMP_PREFIX = A",
        "os.fsync = lambda descriptor: None\n"
        "TMP_PREFIX = A",
        FAULTS,
    ),
    Mutant(
        "faults-directories-unflushed",
        "runtime.files.fsync_dir",
        "os.fsync(A)",
        "",
        FAULTS,
    ),
    Mutant(
        "faults-named-before-described",
        "checkpoint.save._commit",
        "write_new(A / MANIFEST_NAME, B)\n"
        "if os.path.lexists(C):\n"
        "    replace_dir(A, C)\n"
        "else:\n"
        "    publish_dir(A, C)",
        "publish_dir(A, C)\n"
        "write_new(C / MANIFEST_NAME, B)",
        FAULTS,
    ),
    Mutant(
        "faults-swallowed-by-writer-threads",
        "checkpoint.storage._write_shard",
        "A, B = _write_file(P, H, T, S)\n"
        "fsync_dir(D)",
        "with ThreadPoolExecutor(2) as pool:\n"
        "    job = pool.submit(_write_file, P, H, T, S)\n"
        "    pool.submit(fsync_dir, D)\n"
        "A, B = ('', [''] * len(S)) if job.exception() else job.result()",
        FAULTS,
    ),
    Mutant(
        "runtime-shared-lock",
        "runtime.lock.FileLock._lock",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        RUNTIME,
    ),
    # State on disk.
    Mutant(
        "checkpoint-header-unhashed",
        "checkpoint.shard_hash.shard_sha256",
        "for A in H:\n"
        "    D.update(A)",
        "",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-box-offset",
        "checkpoint.storage.read_box",
        "A.start + B * C",
        "A.start",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-unverified",
        "checkpoint.manifest.read_manifest",
        "verify_entries(A, {K: V for K, V in F if K not in R}, hash=C)",
        "verify_entries(A, {K: V for K, V in F if K not in R}, hash=False)",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-shard-unverified",
        "checkpoint.shard_hash.verify_shard",
        "A != B.sha256",
        "False",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-copy-unused",
        "checkpoint.storage._SavePlanner.lookup_object",
        "self._staged is None",
        "True",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-save-not-waited-for",
        "run.tasks.save.SaveTask.finish",
        "yield from self._settle()",
        "",
        ("tests/run/tasks/test_save.py",),
    ),
    Mutant(
        "checkpoint-oldest-first",
        "checkpoint.manifest.step_dirs",
        "sorted(A, reverse=True)",
        "sorted(A)",
        CHECKPOINT,
    ),
    Mutant(
        "checkpoint-keep-one-more",
        "checkpoint.save.prune",
        "A >= keep",
        "A > keep",
        CHECKPOINT,
    ),
    # Rows to batches.
    Mutant(
        "data-target-across-documents",
        "data.batches.collate",
        "A[B - 1] = IGNORED",
        "A[-1] = IGNORED",
        BATCHES,
    ),
    Mutant(
        "data-mask-dropped",
        "data.batches.collate",
        "np.where(A[1:], B[1:], IGNORED)",
        "B[1:]",
        BATCHES,
    ),
    Mutant(
        "data-mask-shifted",
        "data.batches.collate",
        "np.where(A[1:], B[1:], IGNORED)",
        "np.where(A[:-1], B[1:], IGNORED)",
        BATCHES,
    ),
    Mutant(
        "data-positions-run-on",
        "data.batches.collate",
        "A - np.repeat(B, C)",
        "A",
        BATCHES,
    ),
    Mutant(
        "data-same-order-every-epoch",
        "data.batches.row_order",
        "[A & _MASK64, epoch]",
        "[A & _MASK64, 0]",
        BATCHES,
    ),
    Mutant(
        "data-count-of-all-tokens",
        "data.batches.GlobalBatches.step",
        "A.trained_per_row",
        "A.tokens_per_row",
        BATCHES + TRAIN,
    ),
    Mutant(
        "data-filler-trains",
        "data.batches.GlobalBatches._batch",
        "without_targets(A)",
        "A",
        BATCHES,
    ),
    Mutant(
        "data-end-of-turn-untrained",
        "data.encoding.tokenizer.TextTokenizer.end_of_turn",
        "A.end()",
        "A.start()",
        MASKS,
    ),
    Mutant(
        "data-answer-starts-without-prompt",
        "data.encoding.chat.Chat.answer_start",
        "A.startswith(B, C)",
        "B in A",
        MASKS,
    ),
    Mutant(
        "data-ids-of-the-file-alone",
        "transformers_tokenizer._answer",
        "A != []",
        "A is None",
        AS_LOADED,
    ),
    Mutant(
        "data-special-tokens-undeclared",
        "transformers_tokenizer._special_tokens",
        "declared_special_tokens(...) == A",
        "A",
        AS_LOADED,
    ),
    Mutant(
        "export-ids-unchecked",
        "export.verify._require_ids",
        "A in B and C != B[A]",
        "C is None",
        ("tests/export/test_tokenizer_ids.py",),
    ),
    Mutant(
        "data-probe-literal-unseen",
        "data.encoding.template_layout.TemplateLayout.fits",
        "if A in B:\n"
        "    return False",
        "if A == B:\n"
        "    return False",
        SKELETONS,
    ),
    Mutant(
        "data-probe-length-unseen",
        "data.encoding.template_spy._beyond",
        "spy.asked.too_much = True",
        "",
        SKELETONS,
    ),
    Mutant(
        "data-control-token-in-known-shape",
        "data.encoding.encode.Encoder._encode_texts",
        "A.counts(self._is_special) != B",
        "A.counts(self._is_special) < B",
        MASKS + FAST,
    ),
    Mutant(
        "data-straddled-turn-kept",
        "data.encoding.encode.Encoder._encode_texts",
        "A[B.text[B.straddles]] = True",
        "",
        MASKS,
    ),
    Mutant(
        "data-fast-encoder-unproven",
        "data.encoding.fast.ProvenEncoder._prove",
        "not np.array_equal(A, B)",
        "B is None",
        FAST,
    ),
    Mutant(
        "data-characters-not-looked-at",
        "data.encoding.fast.ProvenEncoder._look_at",
        "self._refuted.add(A)",
        "continue",
        FAST,
    ),
    Mutant(
        "data-sample-not-judged",
        "data.encoding.encode.Encoder.encode",
        "self._check(...)",
        "",
        FAST,
    ),
    Mutant(
        "data-unknown-bytes-kept",
        "data.encoding.encode.Encoder._flat",
        "A.counts(self._is_unknown) > 0 if self._is_unknown.any() else B",
        "B",
        FAST,
    ),
    Mutant(
        "data-frame-untrained-end",
        "data.encoding.encode.Encoder._framed",
        "(A - len(suffix) + K, T, True)",
        "(A - len(suffix) + K, T, False)",
        MASKS + FAST,
    ),
    Mutant(
        "data-duplicate-keys-unseen",
        "data.reading.jsonl.fast_json_record",
        "A.count(b\":\") - B",
        "0",
        ("tests/data/reading/test_jsonl.py",),
    ),
    Mutant(
        "data-lines-of-blocks-uncounted",
        "data.building.documents._read",
        "A += B.lines",
        "",
        PREPARE,
    ),
    Mutant(
        "data-answers-as-they-come",
        "data.building.pool.WorkerPool.answers",
        "A, B = C.pop(D)",
        "A, B = C.pop(next(iter(C)))",
        ("tests/data/building/test_pool.py",),
    ),
    Mutant(
        "data-hash-of-all-but-the-end",
        "data.building.stream_file.StreamFiles._end",
        "self._write(A)",
        "write_all(self._descriptor, A)",
        ("tests/data/building/test_stream_file.py",),
    ),
    Mutant(
        "data-digest-without-order",
        "data.sources.content_digest",
        "b\"\".join(A)",
        "b\"\".join(sorted(A))",
        ("tests/data/test_sources.py",),
    ),
    Mutant(
        "data-share-is-the-beginning",
        "data.building.sampling.copies",
        "A[np.argsort(B, kind='stable')[:C]] += 1",
        "A[:C] += 1",
        ("tests/data/building/test_sampling.py",),
    ),
    Mutant(
        "data-equal-documents-on-both-sides",
        "data.building.sampling.hold_out",
        "A[B] = np.repeat(C, D)",
        "A[B[np.cumsum(D) - D]] = C",
        ("tests/data/building/test_sampling.py",),
    ),
    Mutant(
        "data-field-not-in-key",
        "data.building.spec.keys_of",
        "A.special_tokens_in_text",
        "None",
        ("tests/data/building/test_keys.py",),
    ),
    Mutant(
        "data-damage-unseen",
        "data.building.cache.valid",
        "verify_entries(...)",
        "",
        ("tests/data/building/test_cache.py",),
    ),
    Mutant(
        "data-micro-batches-by-chance",
        "data.batches.balance_rows",
        "sorted(range(A), key=lambda slot: -B[slot])",
        "list(range(A))",
        ("tests/data/test_balance.py",),
    ),
    Mutant(
        "data-most-lost-is-a-warning",
        "data.building.losses.length_warnings",
        "A.share > MOST",
        "A.share > 1",
        ("tests/data/building/test_losses.py",),
    ),
    Mutant(
        "data-length-that-keeps-too-short",
        "data.building.losses._rounded_up",
        "-(-A >> B) << B",
        "(A >> B) << B",
        ("tests/data/building/test_losses.py",),
    ),
    Mutant(
        "data-control-token-left-ordinary",
        "data.encoding.tokenizer_json.with_control_tokens",
        "not A.get('special')",
        "False",
        ("tests/data/encoding/test_named_templates.py",),
    ),
    Mutant(
        "data-first-token-counted",
        "data.building.pack.cut",
        "A + start + 1",
        "A + start",
        ("tests/data/building/test_pack.py",),
    ),
    Mutant(
        "data-pair-cut-too-long",
        "data.building.pack.pair_limit",
        "np.maximum(A - B, C)",
        "np.maximum(A, C)",
        ("tests/data/building/test_pairs.py",),
    ),
    Mutant(
        "data-pair-prompts-of-equal-length-taken-for-equal",
        "data.encoding.compared._unlike",
        "A & ~(B & C)",
        "A & ~B",
        ("tests/data/building/test_pairs.py",),
    ),
    Mutant(
        "data-partner-of-the-same-prompt",
        "data.building.partners.partners",
        "np.searchsorted(A, B, side='right')",
        "np.searchsorted(A, B, side='left')",
        ("tests/data/building/test_pairs.py",),
    ),
    # The model.
    Mutant(
        "model-window-one-wider",
        "model.blocked_attention.band",
        "A < window",
        "A <= window",
        MODEL,
    ),
    Mutant(
        "model-flash-window-one-wider",
        "model.flash_attention._run",
        "(A - 1, 0)",
        "(A, 0)",
        ("tests/model/test_cuda_attention.py",),
    ),
    Mutant(
        "model-flash-longest-too-short",
        "model.documents.Documents.of",
        "max(A)",
        "min(A)",
        ("tests/model/test_cuda_attention.py",),
    ),
    Mutant(
        "model-documents-see-each-other",
        "model.documents.Documents.of",
        "[0, *accumulate(A)]",
        "[0, sum(A)]",
        MODEL,
    ),
    Mutant(
        "model-gradient-sign",
        "model.output_layer.softmax_into_gradient",
        "A.new_full(B, -1.0)",
        "A.new_full(B, 1.0)",
        MODEL,
    ),
    Mutant(
        "model-last-chunk-alone",
        "model.output_layer.Gradients.add",
        "A if self._first else B",
        "A",
        MODEL,
    ),
    Mutant(
        "model-missing-weights-pass",
        "model.build.build_model",
        "_require_complete(...)",
        "",
        MODEL,
    ),
    Mutant(
        "model-adapter-in-base-type",
        "model.adapter.add_lora",
        "A.data = A.data.float()",
        "A.data = A.data.clone()",
        MODEL,
    ),
    # The same model over processes.
    Mutant(
        "parallel-gradients-averaged",
        "parallel.fsdp.shard",
        "A.set_gradient_divide_factor(1.0)",
        "",
        RANKS,
    ),
    Mutant(
        "parallel-buffers-left-out",
        "parallel.fsdp._tensors",
        "[*A.named_parameters(), *A.named_buffers()]",
        "[*A.named_parameters()]",
        RANKS,
    ),
    # One optimizer step at a time.
    Mutant(
        "train-normalised-per-microbatch",
        "train.step.forward_backward",
        "A.loss(B).backward()",
        "A.loss({name: B[name] / len(batches.micro) for name in B}).backward()",
        TRAIN,
    ),
    Mutant(
        "train-no-clipping",
        "train.step.optimizer_step",
        "A.optimizer.step(B, C)",
        "A.optimizer.step(B)",
        TRAIN,
    ),
    Mutant(
        "train-guard-reopens",
        "train.guard.Guard.judge",
        "A = B | shut",
        "A = B",
        TRAIN,
    ),
    Mutant(
        "train-spikes-from-half-a-window",
        "train.guard.Guard._is_spike",
        "A >= WINDOW",
        "A >= WINDOW // 2",
        TRAIN,
    ),
    Mutant(
        "train-feed-swallows-the-next",
        "train.prefetcher.Prefetcher.next",
        "self._ahead = None",
        "self._ahead = current",
        TRAIN,
    ),
    Mutant(
        "train-dropout-repeats",
        "train.step.forward_backward",
        "_mixed(A, B, C, D)",
        "_mixed(A, C, D)",
        TRAIN,
    ),
    Mutant(
        "train-divergence-of-one-rank",
        "train.step.of_step",
        "dist.all_reduce(A)",
        "",
        ("tests/multi/test_answers.py",),
    ),
    Mutant(
        "train-divergence-below-zero",
        "train.methods.kto.Kto.terms",
        "A.clamp_min(0)",
        "A",
        ("tests/train/test_answer_losses.py",),
    ),
    Mutant(
        "train-sft-term-by-all-answers",
        "train.methods.preference.PairMethod.counts",
        "A.trained_per_document[::2]",
        "A.trained_per_document",
        ("tests/train/test_answer_losses.py",),
    ),
    Mutant(
        "train-odds-the-wrong-way",
        "train.methods.orpo.log_odds",
        "A - torch.where(...)",
        "A + torch.where(...)",
        ("tests/train/test_answer_steps.py",),
    ),
    Mutant(
        "model-kept-logits-for-all",
        "model.output_layer._PositionLosses.backward",
        "A * B[:, None]",
        "A",
        ("tests/model/test_output_layer.py",),
    ),
    Mutant(
        "train-schedule-one-late",
        "run.loop.train_loop",
        "A.factor(B + 1)",
        "A.factor(B)",
        TRAIN,
    ),
    Mutant(
        "train-decay-on-norms",
        "train.optimizer.group_parameters",
        "A if is_matrix(...) else 0.0",
        "A",
        TRAIN,
    ),
    Mutant(
        "train-resume-forgets-updates",
        "run.state.restore",
        "A.set_step_count(B)",
        "",
        TRAIN,
    ),
    Mutant(
        "train-early-stop-late",
        "train.progress.EarlyStop.is_due",
        "A.stale >= B",
        "A.stale > B",
        ("tests/run/test_early_stop.py",),
    ),
    Mutant(
        "run-finished-unhashed",
        "run.previous._is_whole",
        "verify_shard(A, B, C)",
        "None",
        ("tests/run/test_previous.py",),
    ),
    Mutant(
        "train-reset-forgotten",
        "run.changes.resets_for",
        "resets_of(A.state if B is None else B)",
        "resets_of(A.state)",
        ("tests/run/test_resets.py",),
    ),
    # What it costs.
    Mutant(
        "profile-frees-forgotten",
        "profile.events._Replay._enter",
        "A.freed = len(self._changes)",
        "",
        PROFILE,
    ),
    # The way out.
    Mutant(
        "generate-prompt-token-in-answer",
        "generate.Generator.generate",
        "A[0, len(B):]",
        "A[0, len(B) - 1:]",
        ("tests/test_generate.py",),
    ),
    Mutant(
        "export-merge-sign",
        "export.tensors._merged",
        "A.float() + B * C.scale",
        "A.float() - B * C.scale",
        EXPORT,
    ),
    Mutant(
        "export-damage-unseen",
        "export.tensors._Chunks._check",
        "A.hexdigest() != B.sha256",
        "not A.hexdigest()",
        EXPORT,
    ),
    Mutant(
        "export-first-rows-again",
        "export.tensors._Chunks._fill",
        "A if self._entry.shape else 0",
        "0",
        EXPORT,
    ),
    Mutant(
        "export-any-logits-pass",
        "export.verify.require_close",
        "not A.relative <= B",
        "A.relative < 0",
        EXPORT,
    ),
    Mutant(
        "export-written-bytes-unchecked",
        "export.verify.require_written",
        "sha256_of_same(P, A) if B else None",
        "__import__(\"hashlib\").sha256(P.read_bytes()).hexdigest()",
        EXPORT,
    ),
    InC(
        "native-window-off-by-one",
        "seen",
        "query - window + 1 > key ? query - window + 1 - key : 0",
        "query - window > key ? query - window - key : 0",
        NATIVE,
    ),
    InC(
        "native-fade-forgotten",
        "forward",
        "total[i] = total[i] * fade + sum_of(sums);",
        "total[i] = total[i] + sum_of(sums);",
        NATIVE,
    ),
    InC(
        "native-no-number-hidden",
        "exp2_of",
        "pick(x < -126.0f, (vec){0}, x)",
        "(vec){0}",
        NATIVE,
    ),
    InC(
        "native-target-kept",
        "one_row",
        "if (at == block) gradient[target - block] -= weight;",
        "",
        NATIVE,
    ),
    InC(
        "native-norm-without-mean",
        "rms_norm_backward",
        "* inverse * inverse;",
        "* inverse;",
        NATIVE,
    ),
    InC(
        "native-rotation-not-back",
        "rotate",
        "if (r->back) {",
        "if (0) {",
        NATIVE,
    ),
    InC(
        "native-gate-slope",
        "backward_of",
        "gate * (1.0f - share)",
        "gate * share",
        NATIVE,
    ),
)
