"""Computes: the models, in plain PyTorch.

decoder.py           Llama, Mistral, Phi-4, Qwen2, Qwen3 and SmolLM3
gemma3.py            Gemma 3
granite.py           Granite 3
moe.py               experts (Qwen3-MoE, Qwen3.5-MoE, Qwen3-Next)
olmo.py              OLMo 2 and OLMo 3
qwen3_5.py           layers with recurrent states (Qwen3.5, Qwen3-Next)
opt.py               OPT
spec.py              the interface between the worker and a model
architectures.py     config.json to a spec
attention_fields.py  what config.json says of attention
quantized_layers.py  which layers are quantized
weights.py           makes a model, and loads its weights
"""
