"""Bodies that learners have written, and that are wrong. A test of the evening notices each one.

course_sweep.py changes the function's text `before`, which it has once, to `after`.
"""

from typing import NamedTuple


class WrongBody(NamedTuple):
    evening: int
    function: str  # as in evenings.py
    before: str
    after: str


SCHEDULER = "nanovllm.engine.scheduler:Scheduler"
BLOCKS = "nanovllm.engine.block_manager:BlockManager"
DRAFTS = "nanovllm.features.speculation"
STATES = "nanovllm.features.recurrent_states:RecurrentStates"
WEIGHT = "nanovllm.layers.quantized:QuantizedWeight"
KERNEL = "nanovllm.course.own_kernel"

WRONG_BODIES = (
    # K/V that a feature wants to be computed never are.
    WrongBody(
        2,
        f"{SCHEDULER}._admit",
        "prefix = feature.limit_prefix(seq, prefix)",
        "feature.limit_prefix(seq, prefix)",
    ),
    WrongBody(
        2,
        f"{SCHEDULER}._schedule_tokens",
        "num_tokens = feature.limit_tokens(seq, num_tokens)",
        "feature.limit_tokens(seq, num_tokens)",
    ),
    # A chunk that a feature has cut samples.
    WrongBody(
        2,
        f"{SCHEDULER}._schedule_tokens",
        "1 if num_tokens == num_missing else 0",
        "1 if num_missing <= budget else 0",
    ),
    # Blocks that decodes fill are not cached.
    WrongBody(
        2,
        f"{SCHEDULER}._schedule_running",
        "num_tokens % self.block_size > 1",
        "num_tokens % self.block_size != 1",
    ),
    # A preempted or finished sequence keeps its status.
    WrongBody(2, f"{SCHEDULER}._release", "seq.lane = -1", "pass"),
    WrongBody(2, f"{SCHEDULER}.reset", "fromkeys(seqs)", "fromkeys(reversed(list(seqs)))"),
    WrongBody(2, f"{SCHEDULER}.reset", "feature.reset()", "pass"),
    WrongBody(
        2,
        f"{SCHEDULER}.postprocess",
        "self.finish(seq, reason)\n                    break",
        "self.finish(seq, reason)",
    ),
    WrongBody(
        2,
        f"{SCHEDULER}.postprocess",
        'self.finish(seq, "error")\n                    break',
        'self.finish(seq, "error")\n                    continue',
    ),
    # A feature learns of a release when the blocks are gone.
    WrongBody(
        2,
        f"{SCHEDULER}._release",
        """\
        for feature in self.features.releasing:
            feature.releasing(seq)
        self.running.remove(seq)
        self.block_manager.release(seq)
""",
        """\
        self.running.remove(seq)
        self.block_manager.release(seq)
        for feature in self.features.releasing:
            feature.releasing(seq)
""",
    ),
    # With blocks of one token, this is never so.
    WrongBody(
        2,
        f"{SCHEDULER}._schedule_running",
        "if not self._grow(seq):",
        "if num_tokens % self.block_size == 1 and not self._grow(seq):",
    ),
    # A block that accepted draft tokens fill is not cached if more tokens come after it.
    WrongBody(
        2,
        f"{SCHEDULER}.advance",
        "if end % self.block_size < num_tokens:",
        "if end % self.block_size == 0:",
    ),
    # A salt that is part of no hash, and one that takes the place of the secret root.
    WrongBody(3, f"{BLOCKS}.find_root", "if cache_salt is None:", "if True:"),
    WrongBody(3, f"{BLOCKS}.find_root", "list(salt), self.root_hash", "list(salt)"),
    WrongBody(3, f"{BLOCKS}.allocate", "self.blocked = None", "pass"),
    WrongBody(3, f"{BLOCKS}.cache_block", "self.blocked = None", "pass"),
    # A block that two chunks or decodes fill is not cached.
    WrongBody(
        3, f"{BLOCKS}.cache_full_blocks", "start // self.block_size", "cdiv(start, self.block_size)"
    ),
    # A new snapshot takes the slot that a running sequence reads.
    WrongBody(
        6,
        f"{STATES}.take_slot",
        "evictable = [each for each, slot in self.snapshots.items() if slot not in in_use]",
        "evictable = list(self.snapshots)",
    ),
    WrongBody(
        6,
        f"{STATES}.take_slot",
        "empty = [slot for slot in self.empty_slots if slot not in in_use]",
        "empty = list(self.empty_slots)",
    ),
    # The newest snapshot is evicted.
    WrongBody(6, f"{STATES}.take_slot", "evictable[0]", "evictable[-1]"),
    # A preempted sequence leaves a snapshot of its own prefix.
    WrongBody(6, f"{STATES}.limit_prefix", "if seq.num_cached_tokens is None:", "if True:"),
    WrongBody(6, f"{STATES}.advanced", "self.scheduler.block_manager.blocked = None", "pass"),
    WrongBody(6, f"{DRAFTS}.costs:StepCosts.choose_count", "LEAST_GAIN * expected", "expected"),
    # The first candidate that does not pay ends the search.
    WrongBody(
        6,
        f"{DRAFTS}.costs:StepCosts.choose_count",
        "                best_count = count\n",
        "                best_count = count\n            else:\n                break\n",
    ),
    # A draft that does not fit is dropped as a whole.
    WrongBody(
        6,
        f"{DRAFTS}.drafts:Drafts.planned",
        "seq.token_ids.pop()\n                draft.pop()",
        "del seq.token_ids[-len(draft) :]\n                draft.clear()",
    ),
    # A partial prompt loses the blocks of its rest.
    WrongBody(6, f"{DRAFTS}.drafts:Drafts.advanced", "in self.drafts:", "in step.seqs:"),
    # The same tokens in another order are a hit.
    WrongBody(
        3,
        f"{BLOCKS}.compute_hash",
        "xxhash.xxh3_128_intdigest(data, seed=prefix % 2**64)",
        "max(0, prefix) + sum(token_ids) + 1",
    ),
    # Blocks in use stay in the prefix cache.
    WrongBody(
        3,
        f"{BLOCKS}.uncache",
        "if block.is_cached:",
        "if block.is_cached and block.ref_count == 0:",
    ),
    # Hits of generated tokens count.
    WrongBody(
        2,
        f"{SCHEDULER}._admit",
        "min(num_reused_tokens, seq.num_prompt_tokens)",
        "num_reused_tokens",
    ),
    # One victim and no more.
    WrongBody(
        2,
        f"{SCHEDULER}._grow",
        "while not self.block_manager.grow(seq):",
        "if not self.block_manager.grow(seq):",
    ),
    # A preempted sequence goes to the end of the queue.
    WrongBody(2, f"{SCHEDULER}.preempt", "move_to_end(seq, last=False)", "move_to_end(seq)"),
    # A pending token names the sequence in place of its row.
    WrongBody(
        2, f"{SCHEDULER}.advance", "seq.token_ids.append(~row)", "seq.token_ids.append(~index)"
    ),
    # A block is wanted although the last free one is enough.
    WrongBody(
        1,
        f"{BLOCKS}.grow",
        "if num_new > len(self.free_block_ids):",
        "if num_new >= len(self.free_block_ids):",
    ),
    # Seed and position are added.
    WrongBody(
        5,
        "nanovllm.layers.noise:make_noise_keys",
        "map(xxhash.xxh64_intdigest, data, seeds)",
        "[xxhash.xxh64_intdigest(str(p + s)) for p, s in zip(positions, seeds)]",
    ),
    # A proposal is compared with the first tokens, wherever it was made.
    WrongBody(
        6,
        f"{DRAFTS}.drafts:Proposal.learn",
        "zip(self.token_ids, token_ids[self.position :])",
        "zip(self.token_ids, token_ids)",
    ),
    # A group whose weights all have one sign has no code for 0.
    WrongBody(7, f"{WEIGHT}.quantize", ".clamp_(max=0.0)", ""),
    WrongBody(7, f"{WEIGHT}.quantize", ".clamp_(min=0.0)", ""),
    # The scale is rounded to 16 bits, and then the weight.
    WrongBody(
        7,
        f"{WEIGHT}.dequantize",
        "self._for_each_input(self.scales)",
        "self._for_each_input(self.scales).to(self.dtype)",
    ),
    # Each rank plans with the memory of all.
    WrongBody(
        7,
        "nanovllm.worker.cache_plan:find_budget",
        "available * CPU_SHARE / num_ranks",
        "available * CPU_SHARE",
    ),
    # States are read, but not written.
    WrongBody(
        7,
        "nanovllm.benchmark.roofline:compute_step_seconds",
        "(2 if start else 1) * sizes.state",
        "sizes.state",
    ),
    # Slot -1 is the last row of the cache.
    WrongBody(8, f"{KERNEL}:store_kernel", "if slot >= 0:", "if slot >= -1:"),
    # A logical block is taken for a physical one.
    WrongBody(8, f"{KERNEL}:find_rows", "block_ids * BLOCK_SIZE", "positions // BLOCK_SIZE * 4"),
    # Query heads 0, 2, 4 share a K/V head, not 0, 1.
    WrongBody(
        8,
        f"{KERNEL}:attend_whole_kernel",
        "query_head // (NUM_HEADS // HEADS)",
        "query_head % HEADS",
    ),
    WrongBody(8, f"{KERNEL}:attend_whole_kernel", "scores - tl.max(scores, axis=0)", "scores"),
    # Only the sum is rescaled, or only the output.
    WrongBody(8, f"{KERNEL}:attend_range", "output * factor", "output"),
    WrongBody(8, f"{KERNEL}:attend_range", "total * factor", "total"),
    # The maximum of a block, not of all so far.
    WrongBody(
        8,
        f"{KERNEL}:attend_range",
        "tl.maximum(largest, tl.max(scores, axis=0))",
        "tl.max(scores, axis=0)",
    ),
    # What is masked is read.
    WrongBody(
        8,
        f"{KERNEL}:attend_range",
        "tl.load(places + value_offset, mask=mask, other=0.0)",
        "tl.load(places + value_offset)",
    ),
    # A masked score is 0.
    WrongBody(8, f"{KERNEL}:attend_range", """axis=1), float("-inf"))""", "axis=1), 0.0)"),
    # The last split ends where it would if all were full.
    WrongBody(
        8,
        f"{KERNEL}:attend_split_kernel",
        "tl.minimum(start + split_len, context_len)",
        "start + split_len",
    ),
    # Splits are averaged.
    WrongBody(
        8,
        f"{KERNEL}:combine_kernel",
        "tl.exp(maxima - tl.max(maxima, axis=0))",
        "maxima * 0.0 + 1.0",
    ),
    # The sums of the splits are not weighted.
    WrongBody(
        8,
        f"{KERNEL}:combine_kernel",
        "weights * tl.load(totals + splits)",
        "tl.load(totals + splits)",
    ),
    # Each sequence has one query, also in a prefill.
    WrongBody(8, f"{KERNEL}:attend", "batch.max_seqlen_q > 1", "False"),
)

# Changes of course_sweep.py that no test has to notice, by the reason.
HARMLESS = {
    "a fast path, which only saves time": (
        "Scheduler._schedule_running: if num_missing == 1 and ha -> pass",
        "Scheduler._schedule_running: num_missing = num_tokens - seq.num_computed_tokens"
        " -> num_missing = num_tokens + seq.num_computed_tokens",
        "Scheduler._schedule_running: if num_missing == 1 and has_sampled and ("
        " -> if num_missing != 1 and has_sampled and (",
        "Scheduler._schedule_running: if num_missing == 1 and has_sampled and (num"
        " -> if num_missing == 2 and has_sampled and (num",
        "Scheduler._schedule_running: self.block_size > 1): -> self.block_size > 2):",
        "Scheduler.advance: self.block_size < num_tokens: -> self.block_size <= num_tokens:",
        "ModelRunner.prepare_batch: if num_tokens > 1 or start % block_size ="
        " -> if num_tokens >= 1 or start % block_size",
        "make_sampling_batch: if not any(temperatures): -> pass",
        "make_sampling_batch: return SamplingBatch() -> pass",
        "PromptLookup.propose: self.num_read = len(token_ -> pass",
        "Embedding.forward: if self.tp.size == 1: -> pass",
    ),
    "an assertion": ("Scheduler.postprocess: sampled, strict=True): -> sampled, strict=False):",),
    "another hash, which is as good": (
        "BlockManager.compute_hash: ** 128).to_bytes(16, 'little')"
        " -> ** 128).to_bytes(17, 'little')",
        "BlockManager.compute_hash: xxhash.xxh3_128_intdigest(data, seed=prefix % 2 ** 64)"
        " -> xxhash.xxh3_128_intdigest(data, seed=prefix % 3 ** 64)",
        "BlockManager.compute_hash: seed=prefix % 2 ** 64) -> seed=prefix % 2 ** 65)",
        "make_noise_keys: [position.to_bytes(8, 'little') for position"
        " -> [position.to_bytes(9, 'little') for position",
    ),
    "the same number: the lower bound is not reached, or the result is masked or not used": (
        "make_noise_keys: np.uint64).view(np.int32).reshape(-1, 2)"
        " -> np.uint64).view(np.int32).reshape(-2, 2)",
        "make_sampling_batch: < params.top_k < vocab_size -> < params.top_k <= vocab_size",
        "penalize: torch.where(repeated > 0, repeated / repetition,"
        " -> torch.where(repeated >= 0, repeated / repetition",
        "find_logprobs: max((requested[row] or 0 for row in asking))"
        " -> max((requested[row] or 1 for row in asking))",
        "Embedding.forward: self.look_up(rows.masked_fill(is_elsewhere, 0))"
        " -> self.look_up(rows.masked_fill(is_elsewhere, 1))",
        "CachePlanner.count_lanes: self.block_bytes > 0 else num_bytes"
        " -> self.block_bytes > 1 else num_bytes",
        "CachePlanner.count_lanes: bisect_right(range(1, most + 1), max(0, limit), key=count_bytes"
        " -> bisect_right(range(1, most + 1), max(1, limit), key=count_bytes",
    ),
    "numbers are equal only by chance": (
        "filter_logits: |= mass_before >= filters.top_ps[:, None]"
        " -> |= mass_before > filters.top_ps[:, None]",
        "filter_logits: dropped |= probs < filters.min_ps[:, None] *"
        " -> dropped |= probs <= filters.min_ps[:, None]",
        "StepCosts.choose_count: if expected > best_rate * cost:"
        " -> if expected >= best_rate * cost:",
    ),
}
