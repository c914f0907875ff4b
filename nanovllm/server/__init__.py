"""OpenAI's API over HTTP: `python -m nanovllm.server`. Needs the extra `serve`.

Special tokens that a client writes in a prompt or a message, such as <|im_end|>, become these
tokens, as in vLLM. Whoever serves untrusted text must remove them before.

__main__.py        options, signals, the web server
connections.py     limits on connections
middleware.py      the log of requests, rejection of foreign web pages
openai_api.py      endpoints
bodies.py          reads the JSON of requests
grammar_checks.py  the queue of grammars that clients wait for
cancellation.py    ends work when its client leaves, or when the engine stops
metrics.py         Prometheus' metrics
parameters.py      reads the parameters of a request
parameter_table.py what each endpoint does with each parameter
tools.py           tool calls: which ones are allowed, how they are parsed
protocol.py        OpenAI's objects: replies
message_parser.py  content, reasoning and tool calls in the text of a reply
errors.py          OpenAI's objects: errors
logprobs.py        log probabilities as text
engine_thread.py   the thread that owns the engine
playground.py      the live page: a recorded engine that can be held and stepped
"""
