"""What bench.py is made of. No other folder of the package imports this one.

arguments.py   the command line          setting.py    what it asks for, checked
shapes.py      built-in models, default workloads
engines.py     nanovllm, transformers and vLLM behind one interface
roofline.py    the minimum time          report.py     the table of throughput, and JSON
latency.py     requests that arrive over time
start.py       a program that times the start of an engine
"""
