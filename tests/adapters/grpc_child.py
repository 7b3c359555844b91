"""Runs in the Triton environment: gRPC streams as its standard input asks, results as JSON lines.

Not a test; it has no import of ours.
"""

import json
import queue
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tritonclient.grpc as grpc


def inputs_of(ask):
    inputs = []
    for name in ("text_input", "messages", "sampling_parameters"):
        if name in ask:
            tensor = grpc.InferInput(name, [1], "BYTES")
            tensor.set_data_from_numpy(np.array([ask[name].encode()], dtype=np.object_))
            inputs.append(tensor)
    return inputs


def one(address, ask):
    """One stream to its end: pieces, finish, or the error and how long it took to come."""
    heard = queue.Queue()
    result = {"text": "", "pieces": 0, "finish": None, "usage": None, "error": None, "code": None}
    begin = time.monotonic()
    with grpc.InferenceServerClient(address) as client:
        headers = {"triton_grpc_error": "true"} if ask.get("codes") else None
        client.start_stream(lambda result, error: heard.put((result, error)), headers=headers)
        more = {"timeout": int(ask["timeout_us"])} if "timeout_us" in ask else {}
        client.async_stream_infer(
            ask["model"], inputs_of(ask), enable_empty_final_response=True, **more
        )
        while True:
            try:
                response, error = heard.get(timeout=ask.get("wait_s", 30))
            except queue.Empty:
                result["error"] = "nothing came"
                break
            if error is not None:
                result["error"], result["code"] = error.message(), error.status()
                break
            if response.as_numpy("text_output") is not None:
                text = response.as_numpy("text_output")[0].decode()
                result["text"] += text
                result["pieces"] += bool(text)
                result["finish"] = (
                    response.as_numpy("finish_reason")[0].decode() or result["finish"]
                )
                result["usage"] = response.as_numpy("usage")[0].decode() or result["usage"]
            if response.get_response().parameters["triton_final_response"].bool_param:
                break
            if result["pieces"] == ask.get("cancel_after"):
                result["error"] = "cancelled here"
                break
        client.stop_stream(cancel_requests=result["error"] == "cancelled here")
    result["seconds"] = time.monotonic() - begin
    return result


def unary(address, ask):
    with grpc.InferenceServerClient(address) as client:
        try:
            client.infer(ask["model"], inputs_of(ask))
        except grpc.InferenceServerException as error:
            return {"code": error.status(), "error": error.message()}
    return {"code": None, "error": None}


def main():
    for line in sys.stdin:
        order = json.loads(line)
        address, asks = order["address"], order["asks"]
        if order.get("unary"):
            print(json.dumps([unary(address, ask) for ask in asks]), flush=True)
            continue
        with ThreadPoolExecutor(order.get("at_once", 1)) as pool:
            results = list(pool.map(one, [address] * len(asks), asks))
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
