"""Steps that overlap give the results of steps that do not, and hide the host behind the device.

On a CPU, an engine overlaps its steps only if a test says so.
"""

from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import torch
from conftest import (
    check_idle,
    check_invariants,
    copy_tokenizer,
    cover_pairs,
    disturb_logits,
    greedy,
    make_batch,
    random_prompt,
)
from families import make_family

from nanovllm import LLM, SamplingParams
from nanovllm.engine.feature import Feature
from nanovllm.engine.model_runner import Sampled
from nanovllm.engine.scheduler import POLICIES
from nanovllm.engine.step import Step
from nanovllm.worker.worker import fill_pending

VOCAB_SIZE = 805  # of the demo model's tokenizer
MODELS = ["qwen3", "gemma3", "qwen3-next"]  # the others have windows and recurrent states
PROMPT = random_prompt(0, 24)
TEXT = "the cat sat on the mat. "
JOBS = [
    (PROMPT[:11], greedy(9)),
    (PROMPT, SamplingParams(seed=1, n=3, max_tokens=7, top_k=20, logprobs=2)),
    (PROMPT[:16], SamplingParams(seed=2, max_tokens=1, prompt_logprobs=1, logprobs=0)),
    (TEXT, SamplingParams(seed=3, max_tokens=20, stop=["e", " th"])),
    (TEXT, SamplingParams(seed=4, max_tokens=20, min_tokens=6, stop_token_ids=range(0, 805, 2))),
    (
        PROMPT[5:9],
        SamplingParams(
            seed=5,
            max_tokens=12,
            prompt_logprobs=0,
            presence_penalty=1.0,
            frequency_penalty=0.5,
            repetition_penalty=1.3,
            logit_bias={token: 9.0 for token in range(60)},
            ignore_eos=True,
        ),
    ),
    (TEXT, SamplingParams(seed=6, max_tokens=12, logprobs=1, structured_outputs={"regex": "a*b"})),
    (TEXT, SamplingParams(seed=7, max_tokens=9, structured_outputs={"choice": ["cat", "cats"]})),
    (PROMPT[:19], SamplingParams(seed=8, max_tokens=15, top_p=0.9, min_p=0.01)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    for name in MODELS:
        make_family(directory / name, name, vocab_size=VOCAB_SIZE)
        copy_tokenizer(directory / name)
    return directory


@pytest.fixture(scope="module")
def make(models):
    """A function that makes engines with a block size of 4, by default with a large pool."""

    def make(name="qwen3", num_blocks=128, **options):
        sizes = {"num_kvcache_blocks": num_blocks, "kvcache_block_size": 4, "max_model_len": 48}
        llm = LLM(models / name, **sizes, **options)
        llm.eos_token_ids = frozenset(range(0, VOCAB_SIZE, 40))
        return llm

    return make


@pytest.fixture(scope="module")
def llm(make):
    return make()


class Run:
    """Serves jobs from an empty cache. Has the samples and the outputs that each step reports."""

    def __init__(self, llm, overlaps, jobs=JOBS, act=lambda run: None):
        llm.overlaps = overlaps
        llm.scheduler.reset([])
        self.llm = llm
        self.samples = []
        self.reports = []
        for job in jobs:
            self.samples += llm.requests[llm.add_request(*job)]
        while not llm.is_finished():
            act(self)
            self.reports.append([self.simplify(output) for output in llm.step()])
            check_invariants(llm)
            assert len(self.reports) < 1000, "a request never ends"
        check_idle(llm)
        self.outputs = [self.simplify(sample.output()) for sample in self.samples]
        reported = [output for report in self.reports for output in report]
        ends = [output["index"] for output in reported if output["finish_reason"] is not None]
        assert sorted(ends) == list(range(len(self.samples))), "each end is reported once"

    def simplify(self, output):
        """Leave out what differs between two runs, and round log probabilities."""
        simple = {**output, "index": output["request_id"] - self.samples[0].seq_id}
        for name in ("request_id", "num_cached_tokens", "cumulative_logprob"):
            del simple[name]
        for name in ("logprobs", "prompt_logprobs"):
            if simple[name] is not None:
                simple[name] = [round_all(entry or {}) for entry in simple[name]]
        return simple


def round_all(entry):
    return {token: pytest.approx(value, abs=1e-3) for token, value in entry.items()}


@pytest.mark.parametrize(
    "name, budget, policy, num_blocks",
    cover_pairs(
        MODELS,
        [1, 3, 64],
        POLICIES,
        [13, 128],
        allowed=lambda name, budget, policy, _: POLICIES[policy].splits_prompts or budget == 64,
    ),
)
def test_outputs_are_the_same(make, name, budget, policy, num_blocks):
    with make(name, num_blocks, max_num_batched_tokens=budget, policy=policy) as llm:
        plain = Run(llm, overlaps=False)
        overlapped = Run(llm, overlaps=True)
        assert overlapped.outputs == plain.outputs
        assert {output["finish_reason"] for output in plain.outputs} == {"stop", "length"}
        if num_blocks == 13:
            assert budget < 64 or llm.stats["num_preemptions"] > 0


@pytest.mark.parametrize("jobs", [JOBS[:5], JOBS[4:5]])
def test_everything_is_reported_one_step_later(llm, jobs):
    """Also in the same order. The last job ends by a stop token, which no plan can foresee."""
    plain = Run(llm, False, jobs)
    overlapped = Run(llm, True, jobs)
    assert overlapped.reports == [[], *plain.reports]
    assert plain.outputs[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("overlaps", [False, True])
def test_generated_tokens_are_cached_once_they_are_known(llm, overlaps):
    run = Run(llm, overlaps, [(PROMPT[:6], replace(greedy(10), ignore_eos=True))])
    longer = PROMPT[:6] + run.outputs[0]["token_ids"]
    (output,) = llm.generate([longer], greedy(1))
    assert output["num_cached_tokens"] == 12  # three blocks; the last token was not computed


def test_an_abort_within_a_step_is_counted_once(make):
    """generate returns when all of its requests have ended, of which one is in flight."""
    llm = make("qwen3")
    llm.overlaps = True
    forward = llm.model_runner.forward
    calls = []

    def abort_first(step):
        calls.append(step)
        if len(calls) == 3:
            llm.abort(step.seqs[0].seq_id)
        return forward(step)

    with patch.object(llm.model_runner, "forward", abort_first):
        outputs = llm.generate([PROMPT, PROMPT], greedy(9))
    assert [output["finish_reason"] for output in outputs] == ["abort", "length"]


@pytest.mark.filterwarnings("ignore:request .* ends with an error:RuntimeWarning")
def test_nan_ends_one_request(make):
    with make() as llm:
        disturb_logits(llm, lambda seq: seq.num_prompt_tokens == 19 and len(seq.token_ids) == 22)
        plain = Run(llm, overlaps=False)
        overlapped = Run(llm, overlaps=True)
    assert overlapped.outputs == plain.outputs
    assert len(plain.outputs[-1]["token_ids"]) == 3
    assert plain.outputs[-1]["finish_reason"] == "error"


@pytest.mark.parametrize("host, device", [(3, 8), (8, 3)])
@pytest.mark.parametrize("overlaps", [False, True])
def test_the_host_works_while_the_device_computes(make, host, device, overlaps):
    """By the clocks of a stand-in device, whose calls return at once."""
    now = {"host": 0, "device": 0}
    ready = []  # when the tokens of each step in flight are known

    with make() as llm:
        schedule = llm.scheduler.schedule
        execute = llm.executor.worker.execute
        read = llm.model_runner.read

        def schedule_slowly():
            now["host"] += host
            return schedule()

        def execute_later(batch):
            now["device"] = max(now["device"], now["host"]) + device
            ready.append(now["device"])
            return execute(batch)

        def read_when_ready(sampled):
            now["host"] = max(now["host"], ready.pop(0))
            return read(sampled)

        llm.scheduler.schedule = schedule_slowly
        llm.executor.worker.execute = execute_later
        llm.model_runner.read = read_when_ready
        num_steps = 10
        job = (PROMPT, SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True))
        run = Run(llm, overlaps, [job])
    if overlaps:
        assert len(run.reports) == num_steps + 1  # the last one reads only
        assert now["host"] == num_steps * max(host, device) + host
    else:
        assert len(run.reports) == num_steps
        assert now["host"] == num_steps * (host + device)


def test_tokens_are_read_after_their_copy(llm, monkeypatch):
    gpu = Mock()
    tokens = gpu.tokens
    monkeypatch.setattr(torch.cuda, "Event", gpu.Event)
    sampled = Sampled(Step(), [], Mock(), tokens)
    launched = [name for name, _, _ in gpu.mock_calls]
    assert launched == ["tokens.to", "Event", "Event().record"]
    tokens.to.assert_called_once_with("cpu", non_blocking=True)
    llm.model_runner.read(sampled)
    read = [name for name, _, _ in gpu.mock_calls[len(launched) :]]
    assert read == ["Event().synchronize", "tokens.to().tolist"]


def test_pending_ids_are_filled_in(llm):
    worker = llm.executor.worker
    worker.newest_tokens[:3] = torch.tensor([7, -1, 9])  # row 1 is NaN
    batch = make_batch([5], [5], torch.zeros(1, 1, dtype=torch.int32))
    batch = replace(batch, input_ids=torch.tensor([5, -1, -3, 0, -2], dtype=torch.int32))
    filled = fill_pending(batch, worker.newest_tokens)
    assert filled.input_ids.tolist() == [5, 7, 9, 0, 0]
    assert filled.input_ids.dtype == torch.int32


def test_a_feature_that_cannot_overlap_is_added_while_a_step_is_in_flight(make):
    plain = Run(make(), overlaps=False)

    feature = Feature()
    feature.can_overlap = False

    def add_feature(run):
        if len(run.reports) == 5:
            assert run.llm.in_flight is not None
            run.llm.add_feature(feature)
            assert run.llm.in_flight is None
            assert not run.llm.overlaps

    assert Run(make(), overlaps=True, act=add_feature).outputs == plain.outputs
