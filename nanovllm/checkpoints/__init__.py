"""Reads checkpoints: their configuration, their tensors and their quantized formats.

checkpoint.py    opens a checkpoint: config.json, the tokenizer, generation_config.json, the dtype
tensor_files.py  safetensors files, strictly
quantization.py  which layers are quantized, and the formats of codes
demo_model/      the checkpoint in the package
"""
