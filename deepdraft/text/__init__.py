"""Text in and out: tokenizer, prompts, output parser, rules of chat requests.

Knows nothing of: HTTP, models, the engine.
"""
