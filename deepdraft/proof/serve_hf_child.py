"""transformers' `generate` behind an OpenAI-compatible server of one route: a program of its own.

Owns: /v1/models and streamed, greedy /v1/completions; one answer at a time, as `generate` gives it.
Knows nothing of: deepdraft. It is run by the interpreter of an environment with torch, transformers
and tokenizers as `python FILE CHECKPOINT NAME`, prints its port when it listens, and ends when its
standard input does.

A prompt begins with the model's token of beginning, as with our server, unless the request says
`add_special_tokens: false`.
"""

import importlib
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_MAX_BODY = 4 << 20
_MOST_TOKENS = 1 << 16


class Model:
    """A checkpoint in transformers, float32, on one thread."""

    def __init__(self, directory: str) -> None:
        torch = self.torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        ).eval()
        tokenizers = importlib.import_module("tokenizers")
        self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
        eos = self.model.generation_config.eos_token_id
        eos = self.model.config.eos_token_id if eos is None else eos
        self.ends = set(eos) if isinstance(eos, list) else {eos}
        bos = self.model.config.bos_token_id
        self.first = [] if bos is None else [bos]
        self.lock = threading.Lock()

    def ids(self, body: dict[str, Any]) -> list[int]:
        """The prompt's text, or its token ids as they are."""
        prompt = body["prompt"]
        if isinstance(prompt, list):
            return [int(i) for i in prompt]
        first = [] if body.get("add_special_tokens") is False else self.first
        return [*first, *self.tokenizer.encode(prompt, add_special_tokens=False).ids]

    def text(self, tokens: list[int]) -> str:
        """Control tokens are shown, those that end an answer are not: as with our server."""
        shown = [token for token in tokens if token not in self.ends]
        return self.tokenizer.decode(shown, skip_special_tokens=False)

    def answer(self, ids: list[int], most: int, ignore_eos: bool, put: Any) -> None:
        """Greedy tokens, each to `put` when it comes."""
        torch, prompt = self.torch, self.torch.tensor([ids])
        ends = None if ignore_eos else sorted(self.ends)
        with self.lock, torch.inference_mode():
            self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=most,
                do_sample=False,
                use_cache=True,
                eos_token_id=ends,
                pad_token_id=0,
                streamer=Streamer(put),
            )


class Streamer:
    """What `generate` calls: with the prompt, with each token, at the end."""

    def __init__(self, put: Any) -> None:
        self._put, self._prompt = put, True

    def put(self, value: Any) -> None:
        """The first value is the prompt."""
        if not self._prompt:
            self._put(int(value.reshape(-1)[0]))
        self._prompt = False

    def end(self) -> None:
        """Nothing to do."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    model: Model
    name: str
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        """The list of models."""
        if self.path != "/v1/models":
            self._whole(404, {"error": {"message": f"no {self.path}"}})
            return
        self._whole(200, {"object": "list", "data": [{"id": self.name, "object": "model"}]})

    def do_POST(self) -> None:
        """A streamed completion."""
        size = int(self.headers.get("content-length") or 0)
        if self.path != "/v1/completions" or size > _MAX_BODY:
            self.close_connection = True
            self._whole(404, {"error": {"message": f"no {self.path}; completions are served"}})
            return
        try:
            body = json.loads(self.rfile.read(size))
            most, ids = int(body.get("max_tokens", 16)), self.model.ids(body)
            if not body.get("stream") or body.get("temperature") or not 0 < most <= _MOST_TOKENS:
                raise ValueError("wanted stream, temperature 0 and max_tokens above 0")
        except (ValueError, KeyError, TypeError) as error:
            self._whole(400, {"error": {"message": str(error)}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        tokens: list[int] = []
        sent = ""

        def put(token: int) -> None:
            nonlocal sent
            tokens.append(token)
            text = self.model.text(tokens)
            if not text.endswith("\ufffd") and len(text) > len(sent):
                self._chunk({"choices": [{"index": 0, "text": text[len(sent) :]}]})
                sent = text

        try:
            self.model.answer(ids, most, bool(body.get("ignore_eos")), put)
            # Half a character at the end is dropped, as by our server.
            text = self.model.text(tokens).removesuffix("\ufffd")
            finish = "length" if len(tokens) >= most else "stop"
            rest = {"index": 0, "text": text[len(sent) :], "finish_reason": finish}
            usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
            self._chunk({"choices": [rest]})
            self._chunk({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass  # the client has gone, which ends `generate` at its next token
        except (RuntimeError, ValueError, IndexError) as error:
            self._chunk({"error": {"message": f"{type(error).__name__}: {error}"}})

    def _chunk(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _whole(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(directory: str, name: str) -> None:
    """Serves until standard input ends."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    begin = time.perf_counter()
    Handler.model, Handler.name = Model(directory), name
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    transformers = importlib.import_module("transformers")
    about = {
        "port": server.server_address[1],
        "engine": f"transformers {transformers.__version__}",
        "load_s": round(time.perf_counter() - begin, 2),
    }
    print(json.dumps(about), flush=True)
    sys.stdin.buffer.read()
    os._exit(0)  # an answer that is under way is nobody's any more


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
