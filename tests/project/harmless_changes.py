"""Changes of course_sweep.py that no test has to notice, by the reason."""

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
