"""`deepdraft doctor`: what is wrong with a checkpoint, by what it says about itself.

`static` reads config.json, headers and the tokenizer; `values` reads weights; `dynamic` runs the
native engine; `engines` knows what other engines need; `run` puts them together.

Without a reference it finds what is inconsistent in itself: a rotary base of 1e4 in place of 1e5 is
consistent, and only `deepdraft parity` sees it.
"""
