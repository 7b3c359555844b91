"""Tests of prompts, tokenizer, output parser and request rules."""
