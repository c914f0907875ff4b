"""Computes: the models, in plain PyTorch.

spec.py           what the engine and the worker know of a model
decoder.py        Llama, Mistral, Phi-4, Qwen2, Qwen3 and SmolLM3
architectures.py  config.json to a spec, with a row for each family
config_fields.py  fields of config.json: sizes of heads, windows, RoPE, the maximum length
weights.py        makes a model, and loads its weights

gemma3.py         Gemma 3
moe.py            experts (Qwen3-MoE, Qwen3.5-MoE, Qwen3-Next)
qwen3_5.py        layers with recurrent states (Qwen3.5, Qwen3-Next)
mtp.py            a head with which a model drafts its own next tokens

any_decoder.py        any other decoder of transformers, with paged attention
observation.py        what its layers attend to, and whether tokens meet elsewhere
recognized_layers.py  its layers that compute the same as one of layers/
borrowed.py           what all this uses of transformers' modeling code
"""
