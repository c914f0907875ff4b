"""The check of nanovllm/course/own_model.md: a model of one's own gives what transformers gives.

    python -m pytest tests/models/test_own_model.py

It compares log probabilities, because a soft-cap changes no greedy token, and a rotation in the
wrong direction rarely does.
"""

import re

import pytest
import torch
from conftest import make_checkpoint, random_prompt
from project_helpers import ROOT
from transformers import NanoChatConfig

from nanovllm import LLM, SamplingParams
from nanovllm.models import architectures
from nanovllm.models.architectures import ARCHITECTURES, read_spec

NAME = "NanoChatForCausalLM"
PAGE = (ROOT / "nanovllm/course/own_model.md").read_text()


@torch.inference_mode()
def check_model(directory):
    """Compare tokens, and the log probabilities of each token of the prompt and the answer.

    The prompt has four chunks. The cap is not the usual one, so it has to come from config.json.
    """
    model = make_checkpoint(
        directory, family=NanoChatConfig, tie_word_embeddings=False, final_logit_softcapping=7.0
    )
    prompt = random_prompt(0, 59)
    llm = LLM(directory, max_num_batched_tokens=16, kvcache_block_size=4, num_kvcache_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5, prompt_logprobs=0)
    with llm:
        (output,) = llm.generate(prompt, params)
    token_ids = prompt + output["token_ids"]
    logits = model(torch.tensor([token_ids])).logits[0]
    assert token_ids[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    expected = logits.log_softmax(-1)
    found = [*output["prompt_logprobs"][1:], *output["logprobs"]]
    for position, logprobs in enumerate(found):
        for token_id, logprob in logprobs.items():
            assert logprob == pytest.approx(expected[position, token_id].item(), abs=1e-3), position


@pytest.mark.skipif(NAME not in ARCHITECTURES, reason="see nanovllm/course/own_model.md")
def test_own_model(tmp_path):
    check_model(tmp_path)


# --- The check notices what the page warns of


def add_model(before="", after=""):
    """Run the page's model and its row, with a changed text. A function in a fold completes it."""
    assert PAGE.count(before) == 1 or not before
    page = PAGE.replace(before, after)
    names = dict(vars(architectures))
    for code in re.findall(r"```py\n(.*?)```", page.partition("## 3")[0], flags=re.DOTALL):
        exec(code, names)
        if "forward" in names:
            names["SquaredReluMLP"].forward = names.pop("forward")


def test_the_model_of_the_page_is_right(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, NAME, None)
    add_model()
    check_model(tmp_path)
    config = NanoChatConfig(architectures=[NAME], hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act"):
        read_spec(config, torch.float32, 1)


@pytest.mark.parametrize(
    "before, after",
    [
        (
            "self.softcap * torch.tanh(super().compute_logits(hidden) / self.softcap)",
            "super().compute_logits(hidden)",
        ),
        ("causal_lm.lm_head, self.softcap)", "causal_lm.lm_head, 15.0)"),
        ("apply_rotary(heads, cos, -sin)", "apply_rotary(heads, cos, sin)"),
        ("self.norm(super().embed(batch))", "super().embed(batch)"),
        ("F.relu(self.fc1(x)).square()", "F.relu(self.fc1(x))"),
    ],
    ids=["no softcap", "another softcap", "the other rotation", "no norm", "no square"],
)
def test_a_wrong_model_is_noticed(tmp_path, monkeypatch, before, after):
    monkeypatch.setitem(ARCHITECTURES, NAME, None)
    add_model(before, after)
    with pytest.raises(AssertionError):
        check_model(tmp_path)
