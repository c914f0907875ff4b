"""Computes: the models, in plain PyTorch.

decoder.py           Qwen3, Qwen2, Llama and Mistral
gemma3.py            Gemma 3
moe.py               experts (Qwen3-MoE)
qwen3_5.py           layers with recurrent states
opt.py               OPT
spec.py              the interface between the worker and a model
architectures.py     config.json to a spec
attention_fields.py  what config.json says of attention
quantized_layers.py  which layers are quantized
weights.py           makes a model, and loads its weights
"""
