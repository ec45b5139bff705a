"""A file in llama.cpp, in a process of its own: `python -m tuner.export.gguf.llama_server`.

Reads a line that says what is to be served, prints the address, and serves who has its key until its standard input
ends. llama.cpp aborts its process over files that it does not like.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import xllamacpp


def parameters_of(job: Mapping[str, Any]) -> Any:
    """What llama.cpp loads a model with: one answer at a time, on the CPU.

    `exact` keeps the attention's cache in float32, as the model is in transformers, and all of it.
    """
    parameters: Any = xllamacpp.CommonParams()
    parameters.model.path, parameters.api_keys, parameters.ui = job["model"], [job["key"]], False
    parameters.n_ctx, parameters.n_parallel, parameters.port = job["context"], 1, 0
    parameters.n_gpu_layers, parameters.use_jinja, parameters.warmup = 0, True, False
    parameters.fit_params, parameters.prefill_assistant = False, False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = job["threads"]
    parameters.cpuparams.poll = parameters.cpuparams_batch.poll = 0  # a shared machine has better to do than wait
    if job["adapter"] is not None:
        parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(job["adapter"], 1.0)]
    if job["exact"]:
        parameters.swa_full = True
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return parameters


def main() -> None:
    """Serve until standard input ends."""
    job, answers = json.loads(sys.stdin.readline()), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may write there
    server: Any = xllamacpp.Server(parameters_of(job))
    try:
        print(str(server.listening_address).removeprefix("http://"), file=answers, flush=True)
        sys.stdin.read()
    finally:
        os._exit(0)  # llama.cpp's own end waits forever where a server has only just begun


if __name__ == "__main__":
    main()
