"""OpenAI's API over HTTP: `python -m nanovllm.server`. Needs the extra `serve`.

__main__.py          options, signals, the web server
connections.py       limits on connections
middleware.py        the log of requests, rejection of foreign web pages
openai_api.py        endpoints
bodies.py            reads the JSON of requests
grammar_utils/checks.py    the queue of grammars that clients wait for
cancellation.py      ends work when its client leaves, or when the engine stops
metrics.py           Prometheus' metrics
parameters.py        reads the parameters of a request
parameter_table.py   what each endpoint does with each parameter
constraints.py       response_format and required tool calls as structured outputs
tools.py             which tools a request allows, and a grammar of their calls
replies.py           OpenAI's objects: replies
message_parser.py    content, reasoning and tool calls in the text of a reply
call_parser.py       the tool calls in that text
parameter_values.py  the values of parameters that a model writes without quotes
text_stream.py       text that arrives in parts, for these parsers
errors.py            OpenAI's objects: errors
logprobs.py          log probabilities as text
engine_thread.py     the thread that owns the engine
playground.py        the live page: a recorded engine that can be held and stepped
"""
