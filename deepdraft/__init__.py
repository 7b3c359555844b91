"""deepdraft: an inference engine for DeepSeek models. Importing it does not import torch."""

__version__ = "0.1.0"
