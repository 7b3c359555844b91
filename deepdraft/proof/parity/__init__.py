"""`deepdraft parity`: a checkpoint in our engine against a reference, and what makes them differ.

`reference` holds what a reference gives; `sources` and `wire` make one; `target` is our side;
`compare` measures; `bisect` finds the first wrong layer; `tensors`, `repairs` and `diagnose` name
the cause; `page` draws it; `run` puts them together.

A reference runs in its own process (`hf_child` in transformers' environment) or elsewhere (a URL).
"""
