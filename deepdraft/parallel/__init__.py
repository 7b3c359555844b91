"""One model over several GPUs or processes: what is split how, and how partial results meet.

`plan`: which tensor is cut where. `group`: exchange among ranks. `shards`: what a model is given.
`rank`, `launch`: processes that start by one command and end together. Importing this package or
`plan`, `rank` and `launch` does not import torch.
"""
