"""What bench.py is made of. No other folder of the package imports this one.

arguments.py  the command line
workloads.py  command lines by name, and the requests
shapes/       built-in models
engines.py    nanovllm, transformers, vLLM and nano-vLLM
runs.py       times runs, and records them
latency.py    requests that arrive over time
roofline.py   the minimum time
report.py     a table of the runs, and their ratios
"""
