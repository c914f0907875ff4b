"""What bench.py is made of. No other folder of the package imports this one.

arguments.py   the command line          workloads.py   a table of workloads, and their requests
shapes.py      built-in models           setting.py     what the command line asks for, checked
engines.py     nanovllm, transformers, vLLM and nano-vLLM behind one interface
runs.py        times runs
roofline.py    the minimum time          report.py      the table of figures, JSON
latency.py     requests that arrive over time
"""
