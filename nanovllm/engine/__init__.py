"""Decides: the core of the engine. After `LLMEngine.step`, read it in this order.

sequence.py         the scheduling state of one sequence
step.py             what a step does with each sequence
feature.py          the points of a step at which optional features act
scheduler.py        two queues, two policies, preemption
block_manager.py    block tables, the prefix cache, eviction
rows.py             the rows of logits of a step, and whose they are
model_runner.py     a step to a batch, logits to tokens
llm_engine.py       one step: schedule, forward, sample, read, record, commit
input_processor.py  prompts to requests
request.py          a sequence with text, as its caller sees it
outputs.py          the types of results

The core imports nothing of features/. Only input_processor.py, request.py and llm_engine.py use
text, and only model_runner.py and rows.py compute with tensors.
"""
