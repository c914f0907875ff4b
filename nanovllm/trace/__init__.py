"""The timeline of an engine: recorded in a trace file, read, and shown as text or as a page.

step.py       the form of a trace, which all others share
recorder.py   fills it with the steps of an engine
timeline.py   LLM(..., trace="trace.json") records its steps in a file
reader.py     reads the file
text.py       steps as text         page.py   as an HTML page
tour.py       python -m nanovllm.trace.tour: four requests under each policy
__main__.py   python -m nanovllm.trace

The recorder is a feature of the engine. LLM imports it only if a trace is asked for.
"""

from nanovllm.trace.page import make_page, save_page
from nanovllm.trace.reader import read
from nanovllm.trace.text import render

__all__ = ["make_page", "read", "render", "save_page"]
