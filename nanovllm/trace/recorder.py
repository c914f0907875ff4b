"""Records the steps of an engine, for a Timeline to write.

Recorder is the last of the engine's features. In a step:

    begin_step, planned      collect admissions and preemptions
    prepared, computed       end their phases
    processed                describes the choice that a grammar leaves to the model
    sampled                  makes a Work for each sequence
    recorded                 completes each Work with the result, and writes the step

A Work is made before the result is recorded, because that removes drafts, and the lane and the
blocks of a sequence that finishes. An interrupted step needs no cleanup, because `begin_step`
discards what an earlier step has collected.

A new fact is a line in one place. Facts about a step are in `_describe_plan` and
`_describe_result`, before and after it. Facts about a sequence are in `_make_work` and
`_describe_work`. The file, the reader and the data of the page then have it, too.
"""

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from nanovllm.engine.feature import Facts, Feature
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.batch import Batch
from nanovllm.layers.penalties import apply_penalties
from nanovllm.text.vocabulary import Vocabulary
from nanovllm.trace.step import TracedStep
from nanovllm.trace.timeline import Timeline
from nanovllm.utils.helpers import cdiv

_NUM_WAITING = 10  # requests of the queue that a step records
_NUM_FREE = 40  # free blocks that a step records
_NUM_CHOICES = 12  # tokens that a step records of those that a grammar allows


@dataclass
class Work:
    """What a step does with a sequence, before its result."""

    seq: Sequence
    lane: int
    start: int  # the first position that it computes
    end: int  # the position after the last one, without the draft
    length: int  # number of tokens before the step, without the draft
    block_table: list[int]  # a copy
    plan: Facts


class Recorder(Feature):
    """Records what the scheduler plans and what a step results in.

    Steps do not overlap, because the phases of a step are measured.
    """

    serves = "trace"
    can_overlap = False

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

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
        self.timeline.begin(settings, Vocabulary(engine.tokenizer), engine.warnings.append)
        return True

    def exit(self) -> None:
        self.timeline.close()

    def reset(self) -> None:
        self.timeline.reset()

    def begin_step(self) -> None:
        self.timeline.mark_time("start")
        self.new_seqs: set[Sequence] = set()  # admitted in this step
        self.preempted: dict[int, Facts] = {}  # lane -> the sequence, in this step
        self.logits: Tensor | None = None  # the model's own, if a grammar changes them
        self.choices: dict[Sequence, Facts] = {}  # those that grammars leave

    def planned(self, step: Step) -> None:
        self.timeline.mark_time("schedule")

    def prepared(self, step: Step, batch: Batch) -> Batch:
        self.timeline.mark_time("prepare")
        return batch

    def computed(self, step: Step, logits: Tensor) -> None:
        if logits.is_cuda:
            # Otherwise the forward pass would be measured as sampling.
            torch.cuda.synchronize(logits.device)
        self.timeline.mark_time("forward")
        self.logits = logits if any([has_grammar(seq) for seq in step.seqs]) else None

    def processed(self, rows: list[Sequence], logits: Tensor) -> Tensor:
        """Record what grammars leave to the model."""
        preferred = self.logits
        if preferred is not None:
            self.logits = None
            allowed = apply_penalties(logits, rows)  # as in the step itself, which bans stop tokens
            for row, seq in enumerate(rows):
                is_first = seq not in self.choices  # other rows follow draft tokens
                if has_grammar(seq) and is_first:
                    self.choices[seq] = describe_choice(preferred[row], allowed[row])
        return logits

    def admitted(self, seq: Sequence) -> None:
        self.new_seqs.add(seq)

    def releasing(self, seq: Sequence) -> None:
        if seq.finish_reason is None:
            manager = self.scheduler.block_manager
            self.preempted[seq.lane] = {
                "request_id": seq.seq_id,
                "blocks": list(seq.block_table),
                # Duplicates whose cached copies were evicted.
                "late_blocks": [
                    block_id
                    for index, block_id in enumerate(seq.block_table)
                    if manager.blocks[block_id].is_duplicate
                    and seq.block_hashes[index] not in manager.hash_to_block_id
                ],
            }

    def sampled(self, step: Step, token_ids: list[list[int]]) -> list[list[int]]:
        self.timeline.mark_time("sample")
        info: Facts = {}
        seqs: dict[Sequence, Facts] = {seq: {} for seq in step.seqs}
        for feature in self.scheduler.features:
            step_facts, seq_facts = feature.describe(step)
            info |= step_facts
            for seq, facts in seq_facts.items():
                seqs[seq] |= facts
        self.works = [self._make_work(step, i, seqs[seq]) for i, seq in enumerate(step.seqs)]
        self.plan = self._describe_plan(step) | info
        return token_ids

    def recorded(self, step: Step) -> None:
        lanes: dict[int, Facts] = {}
        for work, num_logits in zip(self.works, step.num_logits):
            lanes[work.lane] = self._describe_work(work, max(0, num_logits - 1))
        info = self.plan | self._describe_result()
        self.timeline.write_step(TracedStep(info, lanes, self.preempted))

    def _describe_plan(self, step: Step) -> Facts:
        """Facts about the step, before its result."""
        scheduler = self.scheduler
        kinds = {work.plan["kind"] for work in self.works}
        waiting = islice(scheduler.waiting, _NUM_WAITING)
        free = islice(scheduler.block_manager.free_block_ids, _NUM_FREE)
        return {
            "kind": "mixed" if len(kinds) > 1 else kinds.pop(),
            "num_tokens": sum(step.num_tokens),
            "waiting_requests": [(seq.seq_id, len(seq.token_ids)) for seq in waiting],
            "running_requests": [seq.seq_id for seq in scheduler.running],
            "next_free_blocks": list(free),
        }

    def _describe_result(self) -> Facts:
        """Facts about the step, after it."""
        scheduler = self.scheduler
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            **scheduler.block_manager.count_states(),
        }

    def _make_work(self, step: Step, index: int, features: Facts) -> Work:
        """Facts about what the step computes of a sequence, before its result."""
        seq = step.seqs[index]
        num_draft_tokens = len(features.get("draft_token_ids", ()))
        length = len(seq.token_ids) - num_draft_tokens
        block_table = list(seq.block_table)
        is_new = seq in self.new_seqs
        start = seq.num_computed_tokens
        end = start + step.num_tokens[index] - num_draft_tokens
        num_known_blocks = 0 if is_new else cdiv(start, self.scheduler.block_size)
        facts = {
            "request_id": seq.seq_id,
            "kind": "decode" if step.is_decode(index) else "prefill",
            "num_tokens": end - start,
            "num_reused_tokens": start if is_new else 0,
            "blocks": block_table[num_known_blocks:],
            "full_blocks": self._describe_blocks(seq, block_table, start, end),
            **features,
            **self.choices.get(seq, {}),
        }
        if is_new:
            facts["num_prompt_tokens"] = seq.num_prompt_tokens
            facts["token_ids"] = seq.token_ids[:length]
        return Work(
            seq=seq,
            lane=seq.lane,
            start=start,
            end=end,
            length=length,
            block_table=block_table,
            plan=facts,
        )

    def _describe_work(self, work: Work, num_accepted: int) -> Facts:
        """The plan, and facts about what the step has added to a sequence."""
        seq = work.seq
        # Accepted tokens have filled blocks, and a duplicate is cached now if its cached copy was
        # evicted in this step.
        end = work.end + num_accepted
        blocks = self._describe_blocks(seq, work.block_table, work.start, end)
        known = set(work.plan["full_blocks"])
        return {
            **work.plan,
            "new_token_ids": seq.token_ids[work.length :],
            "num_accepted_tokens": num_accepted,
            "late_blocks": [block for block in blocks if block not in known],
            "finish_reason": seq.finish_reason,
        }

    def _describe_blocks(
        self, seq: Sequence, block_table: list[int], start: int, end: int
    ) -> list[tuple[int, bool, str]]:
        """Describe the blocks that the tokens from position `start` to `end` make full.

        For each: its id, whether it is cached, and its hash.
        """
        manager = self.scheduler.block_manager
        if not manager.enable_prefix_caching:
            return []
        described = []
        for index in range(start // manager.block_size, end // manager.block_size):
            block = manager.blocks[block_table[index]]
            described.append((block.block_id, block.is_cached, f"{seq.block_hashes[index]:032x}"))
        return described


def has_grammar(seq: Sequence) -> bool:
    return seq.params.structured_outputs is not None


def describe_choice(logits: Tensor, processed: Tensor) -> Facts:
    """Describe a row of logits: what the model prefers, and what may be sampled."""
    num_allowed = int((processed > -torch.inf).sum())
    num_preferred = min(_NUM_CHOICES, len(logits))
    return {
        "preferred_token_ids": logits.topk(num_preferred).indices.tolist(),
        "num_allowed_tokens": num_allowed,
        "allowed_token_ids": processed.topk(min(_NUM_CHOICES, num_allowed)).indices.tolist(),
    }
