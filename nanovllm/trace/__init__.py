"""The timeline of an engine: recorded in a trace file, read, and shown as text, plot or page.

recorder.py   LLM(..., trace="trace.json") records its steps
timeline.py   the events of a step, and the file
reader.py     the file as a list of steps
text.py       steps as text         picture.py   as a plot        page.py   as an HTML page
tour.py       four requests under two policies, which example.py shows
"""

from nanovllm.trace.page import make_page, save_page
from nanovllm.trace.picture import draw
from nanovllm.trace.reader import read
from nanovllm.trace.step import Step
from nanovllm.trace.text import render

__all__ = ["Step", "draw", "make_page", "read", "render", "save_page"]
