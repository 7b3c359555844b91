"""Control tokens of DeepSeek's vocabularies, by their strings.

Owns: the spellings. Ids are never assumed; which tokens a model has, its tokenizer says.
"""

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
EOT = "<|EOT|>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
IMAGE = "<｜deepseek_image｜>"
FIM_BEGIN = "<｜fim▁begin｜>"
FIM_HOLE = "<｜fim▁hole｜>"
FIM_END = "<｜fim▁end｜>"
CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
CALL_SEP = "<｜tool▁sep｜>"
OUTPUTS_BEGIN = "<｜tool▁outputs▁begin｜>"
OUTPUTS_END = "<｜tool▁outputs▁end｜>"
OUTPUT_BEGIN = "<｜tool▁output▁begin｜>"
OUTPUT_END = "<｜tool▁output▁end｜>"

CALL_MARKS = (CALLS_BEGIN, CALL_BEGIN, CALL_SEP, CALL_END, CALLS_END)
"""What V3, R1 and V3.1 write calls with."""
OUTPUT_MARKS = (OUTPUTS_BEGIN, OUTPUT_BEGIN, OUTPUT_END, OUTPUTS_END)
"""What results of calls are written with; V3.1 uses the two in the middle."""

Segment = tuple[str, bool]
"""A piece of a prompt: its text, and whether it is one control token."""
