"""A file in llama.cpp, in a process of its own: `python -m tuner.export.gguf.llama_server [QUESTIONS]`.

With a file of questions it writes its answers next to them; without, it reads a line that says what is to be served,
prints the address, and serves until its standard input ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import xllamacpp

from tuner.export.gguf.llama_cpp import ANSWERS
from tuner.runtime.files import json_bytes, read_json, write_new


def parameters_of(model: str, context: int, threads: int) -> Any:
    """What llama.cpp loads a model with: one answer at a time, on the CPU."""
    parameters: Any = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx, parameters.n_parallel, parameters.port = context, 1, 0
    parameters.n_gpu_layers, parameters.use_jinja, parameters.warmup = 0, True, False
    parameters.fit_params, parameters.prefill_assistant = False, False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.cpuparams.poll = parameters.cpuparams_batch.poll = 0  # a shared machine has better to do than wait
    return parameters


def address_of(server: Any) -> str:
    """Where it listens, as HOST:PORT."""
    return str(server.listening_address).removeprefix("http://")


class Server:
    """A model that llama.cpp has loaded, asked over a local connection."""

    def __init__(self, model: str, context: int, threads: int, adapter: str | None = None) -> None:
        """Load it, and an adapter onto it; the attention's cache is float32, as its model is in transformers."""
        parameters = parameters_of(model, context, threads)
        parameters.swa_full = True
        if adapter is not None:
            parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server: Any = xllamacpp.Server(parameters)
        self._connection = HTTPConnection(address_of(self._server))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What it answers; `error` where it refuses."""
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer: dict[str, Any] = json.loads(self._connection.getresponse().read())
        return answer

    def ids(self, text: str, framed: bool) -> list[int]:
        """The tokens of a text, with what frames it or without."""
        return list(self.post("/tokenize", {"content": text, "add_special": framed, "parse_special": True})["tokens"])

    def rendered(self, messages: Any, tools: Any) -> str:
        """A chat by the file's template, up to the assistant's turn; the refusal where it is refused."""
        answer = self.post("/apply-template", {"messages": messages, **({"tools": tools} if tools else {})})
        return str(answer["prompt"]) if "prompt" in answer else json.dumps(answer)

    def continued(self, prompt: list[int], tokens: int, top: int) -> dict[str, Any]:
        """The most likely tokens one after another, and the log-probabilities of the likeliest at each."""
        body = {"prompt": prompt, "n_predict": tokens, "temperature": -1, "n_probs": top, "return_tokens": True}
        answer = self.post("/completion", {**body, "cache_prompt": False})
        steps = [
            [step["id"], [[each["id"], each["logprob"]] for each in step["top_logprobs"]]]
            for step in answer.get("completion_probabilities", [])
        ]
        return {"tokens": answer.get("tokens", []), "steps": steps}

    def ends(self, prompt: list[int], token: int) -> bool:
        """Whether generation stops at a token."""
        body = {"prompt": prompt, "n_predict": 2, "temperature": -1, "logit_bias": [[token, 1e6]]}
        return bool(self.post("/completion", body).get("stop_type") == "eos")


def main(job: Path) -> None:
    """Answer the questions of a file."""
    asks = read_json(job)
    server = Server(asks["model"], asks["context"], asks["threads"], asks.get("adapter"))
    chats = [server.rendered(chat["messages"], chat.get("tools")) for chat in asks["chats"]]
    write_new(
        job.with_name(ANSWERS),
        json_bytes(
            {
                "ids": [[server.ids(text, framed) for framed in (False, True)] for text in asks["texts"]],
                "chats": chats,
                "talks": [server.ids(chat, True) for chat in chats],
                "ends": [server.ends(asks["prompts"][0], token) for token in asks["ends"]],
                "answers": [server.continued(each, asks["tokens"], asks["top"]) for each in asks["prompts"]],
            }
        ),
    )


def serve() -> None:
    """Serve what a line on standard input names, to who has its key, until standard input ends."""
    job, answers = json.loads(sys.stdin.readline()), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may write there
    parameters = parameters_of(job["model"], job["context"], job["threads"])
    parameters.api_keys, parameters.ui = [job["key"]], False
    server: Any = xllamacpp.Server(parameters)
    print(address_of(server), file=answers, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1])) if sys.argv[1:] else serve()
