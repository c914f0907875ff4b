"""OpenAI's API over HTTP: `python -m nanovllm.server`. Needs the extra `serve`.

An endpoint that takes JSON is a function of the body and the engine: it returns the reply, or a
Generation that the engine serves. To add one, write it in a file of its own with its parameters
(those of completions are in parameters.py), and give it a line in `Api.make_app` of openai_api.py.

In reading order, the way of a request:

__main__.py            signals until the server runs
web_server.py          options, signals, the web server
openai_api.py          routes, and how a Generation is served
chat_completions.py    POST /v1/chat/completions
completions.py         POST /v1/completions, with echo
embeddings.py          POST /v1/embeddings
tokenization.py        POST /tokenize and /detokenize
parameters.py          which parameters each endpoint has, and those they have in common
replies.py             what replies have in common: choices, chunks, usage
token_texts.py         tokens and log probabilities as text
errors.py              error objects
engine_thread.py       the thread that owns the engine

Tools, formats and reasoning:

constraints.py         tools and response_format as structured outputs
message_parser.py      content, reasoning and tool calls in the text of a reply
calls.py               the tool calls in a block of that text
parameter_values.py    values that a model writes without quotes

HTTP:

bodies.py              reads the JSON of requests, and ends work when its client leaves
middleware.py          the log, rejection of foreign web pages
metrics.py             Prometheus' metrics

playground.py          a recorded engine that can be held and stepped
live_page.py           its live page

The server knows nothing of models and of kernels, and nothing but this folder knows the web
framework. Only the playground looks into the state of an engine.
"""
