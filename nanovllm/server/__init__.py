"""OpenAI's API over HTTP: `python -m nanovllm.server`. Needs the extra `serve`.

__main__.py        options, signals, the web server
openai_api.py      endpoints
protocol.py        OpenAI's objects: parsed requests, written replies
engine_thread.py   the thread that owns the engine
playground.py      the live page: a recorded engine that can be held and stepped
"""
