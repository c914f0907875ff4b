"""A tiny Qwen3 checkpoint. tests/helpers/train_demo_model.py has trained it."""
