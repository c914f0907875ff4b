"""Records the steps of an engine.

Recorder comes after the features that it describes. In a step:

    begin_step                     discards what an earlier step has collected
    admitted, releasing            collect admissions and preemptions
    planned, prepared, computed    end their phases
    processed                      describes the choices that grammars leave to the model
    sampled                        ends its phase, and calls `_describe_plan`
    recorded                       calls `_add_result`, and writes the step

`_describe_plan` makes the TracedStep, with a Work for each sequence. It comes before the result is
recorded, because that removes drafts, and the lane and the blocks of a sequence that finishes.
`_add_result` sets the fields that are known only then. An interrupted step needs no cleanup,
because `begin_step` discards it.

A new fact is a field in step.py and a line in `_describe_plan`, `_describe_work` or `_add_result`.
The file, the reader and the data of the page then have it, too.
"""

import time
from itertools import islice

import torch
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.engine.feature import Facts, Feature
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.penalties import apply_penalties
from nanovllm.text.vocabulary import Vocabulary
from nanovllm.trace.step import FullBlock, Trace, TracedStep, Work
from nanovllm.utils.helpers import cdiv

_NUM_WAITING = 10  # requests of the queue that a step records
_NUM_FREE = 40  # free blocks that a step records
_NUM_CHOICES = 12  # tokens that a step records of those that a grammar allows


class Recorder(Feature):
    """Records what the scheduler plans and what a step results in, by default in memory.

    Steps do not overlap, because the phases of a step are measured.
    """

    serves = "trace"
    can_overlap = False

    def start(self, engine: LLMEngine) -> bool:
        super().start(engine)
        scheduler = engine.scheduler
        settings = {
            "num_blocks": scheduler.block_manager.num_blocks,
            "block_size": scheduler.block_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "policy": scheduler.title,
            "splits_prompts": scheduler.splits_prompts,
        }
        for feature in engine.features:
            settings |= feature.describe_settings()
        self.trace = Trace(settings, [])
        self.num_steps = 0
        self.vocabulary = Vocabulary(engine.tokenizer)
        return True

    def write(self, step: TracedStep) -> None:
        """Keep a step. A subclass writes it elsewhere."""
        self.trace.steps.append(step)

    def reset(self) -> None:
        """The KV cache was emptied.

        The next step records all its texts, because an interrupt may have prevented the last step
        from being written.
        """
        self.is_reset = True  # until the next step is written
        self.named: set[int] = set()  # tokens whose texts are recorded

    def begin_step(self) -> None:
        self.start_us = time.perf_counter_ns() // 1000
        self.phase_start = self.start_us
        self.milliseconds: Facts = {}  # of the phases that have ended, by field
        self.new_seqs: set[Sequence] = set()  # admitted in this step
        self.preempted: list[Work] = []
        self.choices: dict[Sequence, Facts] = {}  # those that grammars leave

    def _end_phase(self, phase: str) -> None:
        now = time.perf_counter_ns() // 1000
        self.milliseconds[f"{phase}_ms"] = (now - self.phase_start) / 1e3
        self.phase_start = now

    def admitted(self, seq: Sequence) -> None:
        self.new_seqs.add(seq)

    def releasing(self, seq: Sequence) -> None:
        if seq.finish_reason is not None:
            return
        work = Work(seq.seq_id, seq.lane, kind="preempted", num_tokens=0)
        work.blocks = list(seq.block_table)
        manager = self.scheduler.block_manager
        for block_id, block_hash in zip(seq.block_table, seq.block_hashes):
            # A duplicate is cached when it is released, if its cached copy was evicted.
            if manager.blocks[block_id].is_duplicate and block_hash not in manager.hash_to_block_id:
                work.late_blocks.append((block_id, True, f"{block_hash:032x}"))
        self.preempted.append(work)

    def planned(self, step: Step) -> None:
        self._end_phase("schedule")

    def prepared(self, step: Step, batch: Batch) -> Batch:
        self._end_phase("prepare")
        return batch

    def computed(self, step: Step, logits: Tensor) -> None:
        if logits.is_cuda:
            # Otherwise the forward pass would be measured as sampling.
            torch.cuda.synchronize(logits.device)
        self._end_phase("forward")
        self.logits = logits

    def processed(self, rows: list[Sequence], logits: Tensor) -> Tensor:
        """Record what grammars leave to the model."""
        for row, seq in enumerate(rows):
            # Only the first row of a sequence: other rows follow draft tokens.
            if seq.params.structured_outputs and seq not in self.choices:
                # As in the step itself, which bans stop tokens after this.
                (allowed,) = apply_penalties(logits[row : row + 1], [seq])
                self.choices[seq] = describe_choice(self.logits[row], allowed)
        return logits

    def sampled(self, step: Step, token_ids: list[list[int]]) -> list[list[int]]:
        """Describe the plan before other features verify drafts."""
        self._end_phase("sample")
        del self.logits  # they are large
        self.traced = self._describe_plan(step)
        return token_ids

    def _describe_plan(self, step: Step) -> TracedStep:
        scheduler = self.scheduler
        self.block_tables = {seq: list(seq.block_table) for seq in step.seqs}
        self.works = {seq: self._describe_work(step, i) for i, seq in enumerate(step.seqs)}
        features: Facts = {}
        for feature in scheduler.features:
            step_facts, seq_facts = feature.describe(step)
            features |= step_facts
            for seq in seq_facts:
                self.works[seq].features |= seq_facts[seq]
        kinds = {work.kind for work in self.works.values()}
        waiting = islice(scheduler.waiting, _NUM_WAITING)
        free = islice(scheduler.block_manager.free_block_ids, _NUM_FREE)
        return TracedStep(
            step=self.num_steps,
            is_reset=self.is_reset,
            start_us=self.start_us,
            **self.milliseconds,
            kind="mixed" if len(kinds) > 1 else kinds.pop(),
            num_tokens=sum(step.num_tokens),
            waiting_requests=[(seq.seq_id, len(seq.token_ids)) for seq in waiting],
            running_requests=[seq.seq_id for seq in scheduler.running],
            next_free_blocks=list(free),
            features=features,
            work=[*self.works.values(), *self.preempted],
        )

    def _describe_work(self, step: Step, index: int) -> Work:
        seq = step.seqs[index]
        start = seq.num_computed_tokens
        work = Work(seq.seq_id, seq.lane, start, features=self.choices.get(seq, {}))
        if not step.is_decode(index):
            work.kind = "prefill"
            work.num_tokens = step.num_tokens[index]
        if seq in self.new_seqs:
            work.num_reused_tokens = start
            work.num_prompt_tokens = seq.num_prompt_tokens
            work.token_ids = list(seq.token_ids)
        num_known_blocks = cdiv(start - work.num_reused_tokens, self.scheduler.block_size)
        work.blocks = seq.block_table[num_known_blocks:]
        work.full_blocks = self._list_full_blocks(seq, start, start + work.num_tokens)
        return work

    def recorded(self, step: Step) -> None:
        self._add_result(step)
        self.is_reset = False
        self.num_steps += 1
        self.write(self.traced)  # last, so that an interrupt that follows finds the state above

    def _add_result(self, step: Step) -> None:
        for seq, _, num_logits in step:
            work = self.works[seq]
            end = work.start + work.num_tokens
            if num_logits > 0:
                work.new_token_ids = seq.token_ids[end:]
                work.num_accepted_tokens = num_logits - 1
            # Accepted tokens have filled blocks, and a duplicate is cached now if its cached copy
            # was evicted in this step.
            known = set(work.full_blocks)
            blocks = self._list_full_blocks(seq, work.start, end + work.num_accepted_tokens)
            work.late_blocks = [block for block in blocks if block not in known]
            work.finish_reason = seq.finish_reason
        scheduler = self.scheduler
        traced = self.traced
        traced.texts = self._name_tokens(traced.work)
        traced.sequences = {"waiting": len(scheduler.waiting), "running": len(scheduler.running)}
        traced.blocks = scheduler.block_manager.count_states()

    def _list_full_blocks(self, seq: Sequence, start: int, end: int) -> list[FullBlock]:
        """List the blocks that the tokens from position `start` to `end` make full."""
        manager = self.scheduler.block_manager
        if not manager.enable_prefix_caching:
            return []
        span = slice(start // manager.block_size, end // manager.block_size)
        return [
            (block_id, manager.blocks[block_id].is_cached, f"{block_hash:032x}")
            for block_id, block_hash in zip(self.block_tables[seq][span], seq.block_hashes[span])
        ]

    def _name_tokens(self, works: list[Work]) -> dict[int, str]:
        """Return the texts of tokens of this step that no earlier step has recorded."""
        if self.vocabulary.tokenizer is None:
            return {}
        shown: set[int] = set()
        for work in works:
            for name, value in {**vars(work), **work.features}.items():
                if name.endswith("token_ids"):
                    shown.update(value)
        new = shown - self.named
        self.named |= new
        return {token_id: self.vocabulary.name(token_id) for token_id in sorted(new)}


def describe_choice(logits: Tensor, processed: Tensor) -> Facts:
    """Describe a row of logits: what the model prefers, and what may be sampled."""
    num_allowed = int((processed > -torch.inf).sum())
    num_preferred = min(_NUM_CHOICES, len(logits))
    return {
        "preferred_token_ids": logits.topk(num_preferred).indices.tolist(),
        "num_allowed_tokens": num_allowed,
        "allowed_token_ids": processed.topk(min(_NUM_CHOICES, num_allowed)).indices.tolist(),
    }
