"""A tiny Qwen3 checkpoint, and the script that trained it."""
