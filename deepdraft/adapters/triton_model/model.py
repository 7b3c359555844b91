"""A model of Triton's Python backend that passes requests on to an engine's HTTP server.

Written into a model repository by `deepdraft export triton`; standard library and numpy only, for
it runs in the server's own environment. Decoupled: each request gets as many responses as the
engine sends pieces, the last one with `finish_reason`. Reading the engine is `engine_stream`.
"""

import json
import os
import sys
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils  # pyrefly: ignore[missing-import]

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import engine_stream  # pyrefly: ignore[missing-import]

_LOOK_S = 0.02
_CODES = {
    "invalid": "INVALID_ARG",
    "not_found": "NOT_FOUND",
    "unavailable": "UNAVAILABLE",
    "cancelled": "CANCELLED",
    "deadline": "CANCELLED",
    "internal": "INTERNAL",
}


class TritonPythonModel:
    """One instance serves all requests, each in a thread that mostly waits for the engine."""

    def initialize(self, args):
        """Fails where the engine does not answer, so that Triton is not ready then."""
        config = json.loads(args["model_config"])
        values = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
        self._settings = engine_stream.Settings.read(values)
        self._settings.key = os.environ.get("DEEPDRAFT_ENGINE_API_KEY") or None
        if not engine_stream.is_ready(self._settings):
            raise pb_utils.TritonModelException(
                f"the engine at {self._settings.url} is not ready ({self._settings.ready_path})"
            )
        self._lock = threading.Lock()
        self._running = {}
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def execute(self, requests):
        """Starts each request and returns; responses follow from threads."""
        for request in requests:
            sender = _Sender(request.get_response_sender())
            try:
                stream = self._stream(request)
            except engine_stream.Fault as fault:
                sender.end(fault)
                continue
            thread = threading.Thread(target=self._serve, args=(sender, stream), daemon=True)
            with self._lock:
                full = len(self._running) >= self._settings.max_in_flight
                if not full:
                    self._running[stream] = (sender, thread)
            if full:
                fault = engine_stream.Fault(
                    "unavailable", f"{self._settings.max_in_flight} requests are under way"
                )
                sender.end(fault)
                continue
            thread.start()

    def finalize(self):
        """Cancels what still runs and waits for it."""
        self._ended.set()
        with self._lock:
            running = list(self._running.items())
        for stream, _ in running:
            stream.cut("cancelled", "the model is unloaded")
        for _, (_, thread) in running:
            thread.join(5.0)
        self._watcher.join(1.0)

    def _stream(self, request):
        text = _input(request, "text_input")
        messages = _input(request, "messages")
        sampling = _input(request, "sampling_parameters")
        streamed = pb_utils.get_input_tensor_by_name(request, "stream")
        body = engine_stream.body(self._settings, text, messages, sampling)
        deadline_s = self._settings.deadline_s
        asked_us = request.timeout()
        if asked_us:
            deadline_s = min(deadline_s, asked_us / 1e6)
        whole = streamed is not None and not bool(streamed.as_numpy().flatten()[0])
        return engine_stream.Stream(self._settings, body, deadline_s, whole=whole)

    def _serve(self, sender, stream):
        fault = None
        try:
            for piece in stream.pieces():
                sender.send(_response(piece))
        except engine_stream.Fault as error:
            fault = error
        except Exception as error:
            fault = engine_stream.Fault("internal", f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._running.pop(stream, None)
            sender.end(fault)

    def _watch(self):
        """Ends streams whose clients have gone, or whose time is over."""
        while not self._ended.wait(_LOOK_S):
            with self._lock:
                running = [(stream, sender) for stream, (sender, _) in self._running.items()]
            now = time.monotonic()
            for stream, sender in running:
                if sender.is_cancelled():
                    stream.cut("cancelled", "the client cancelled the request")
                elif now > stream.deadline:
                    stream.cut("deadline", f"not whole within {stream.deadline_s:g} s")


def _input(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    values = tensor.as_numpy().flatten()
    if len(values) != 1:
        raise engine_stream.Fault("invalid", f"{name} must hold one text, got {len(values)}")
    try:
        return bytes(values[0]).decode("utf-8")
    except (UnicodeDecodeError, TypeError) as error:
        raise engine_stream.Fault("invalid", f"{name} is no UTF-8 text: {error}") from error


def _response(piece):
    def text(name, value):
        return pb_utils.Tensor(name, np.array([value.encode("utf-8")], dtype=np.object_))

    return pb_utils.InferenceResponse(
        output_tensors=[
            text("text_output", piece.text),
            text("reasoning_output", piece.reasoning),
            text("finish_reason", piece.finish or ""),
            text("usage", json.dumps(piece.usage) if piece.usage else ""),
        ]
    )


class _Sender:
    """A request's way back, used by its thread and by the watcher, one at a time.

    The server frees its side with the final flag: asking it afterwards whether the client has gone
    ends the whole server with a segmentation fault (seen with 2.51).
    """

    def __init__(self, sender):
        self._sender, self._lock, self._ended = sender, threading.Lock(), False

    def send(self, response):
        with self._lock:
            self._sender.send(response)

    def is_cancelled(self):
        with self._lock:
            return not self._ended and self._sender.is_cancelled()

    def end(self, fault):
        """The final flag, with the error if there was one. A client that has gone hears nothing."""
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        with self._lock:
            self._ended = True
            try:
                if fault is None:
                    self._sender.send(flags=final)
                else:
                    code = getattr(pb_utils.TritonError, _code(fault))
                    error = pb_utils.TritonError(str(fault), code)
                    self._sender.send(pb_utils.InferenceResponse(error=error), flags=final)
            except Exception as error:
                pb_utils.Logger.log_warn(f"the end of a response was not sent: {error}")


def _code(fault):
    return _CODES.get(fault.kind, "INTERNAL")
