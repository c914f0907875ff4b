"""The eight evenings of the course: what to read, what to write, and the tests that must pass.

tests/course.py makes the copy in which the functions of an evening are empty. Pages, scenes and
exercises are those of nanovllm/course/ and of the reader's guide, nanovllm/README.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Evening:
    number: int
    title: str
    page: str  # its text
    scene: str  # what to predict first
    reading: tuple[str, ...]  # files, or functions and classes as in `functions`
    functions: Sequence[str]  # module:qualified name, in the order in which to write them
    tests: tuple[str, ...]  # arguments of pytest. At least one test fails without each function
    exercise: int  # of the reader's guide


EVENINGS = (
    Evening(
        number=1,
        title="Why blocks",
        page="nanovllm/course/1_blocks.md",
        scene="steps 0 and 3 of timeline.html: the blocks of A, and the slot of its 25th token",
        reading=("nanovllm/engine/sequence.py", "nanovllm/batch/batch.py"),
        functions="""
            nanovllm.engine.block_manager:BlockManager.take
            nanovllm.engine.block_manager:BlockManager.grow
            nanovllm.engine.block_manager:BlockManager.release
            nanovllm.engine.block_manager:BlockManager.count_states
            nanovllm.batch.batch:make_batch
            nanovllm.layers.attention:make_cache
            nanovllm.layers.attention:store_kvcache
            nanovllm.layers.attention:find_first_visible
            nanovllm.layers.attention:attend
        """.split(),
        tests=(
            "tests/engine/test_block_manager.py",
            "tests/kernels/test_attention.py::test_torch_backend_matches_softmax",
            "tests/kernels/test_attention.py::test_torch_backend_caps_scores_and_adds_sinks",
            "tests/kernels/test_attention.py::test_torch_backend_returns_the_dtype_of_the_query",
            "tests/kernels/test_attention.py::test_sequences_can_share_some_of_their_blocks",
            "tests/kernels/test_attention.py::test_a_rank_has_some_of_the_heads_of_a_shape",
            "tests/kernels/test_attention.py::test_a_table_can_be_wider_than_the_longest_context",
            "tests/kernels/test_attention.py::test_torch_backend_holds_one_tile_of_the_mask",
            "tests/kernels/test_attention.py::test_store_kvcache_writes_its_slots_and_no_others",
            "tests/kernels/test_attention.py::test_only_a_backend_knows_the_layout_of_its_cache",
            "tests/kernels/test_attention.py::test_a_window_begins_where_its_first_token_is",
            "tests/kernels/test_attention.py::test_block_0_of_a_new_cache_is_zeros",
            "tests/kernels/test_attention.py::test_a_batch_without_sequences_is_as_drawn",
            "tests/kernels/test_attention.py::test_the_last_tokens_of_each_sequence_have_logits",
        ),
        exercise=6,
    ),
    Evening(
        number=2,
        title="Two queues",
        page="nanovllm/course/2_queues.md",
        scene="steps 3, 11 and 14 of timeline.html: what they compute, and what is preempted",
        reading=(
            "nanovllm/engine/sequence.py",
            "nanovllm.engine.llm_engine:LLMEngine.step",
            "nanovllm.engine.llm_engine:LLMEngine._complete",
            "nanovllm.engine.step:Step.add",
            "nanovllm.engine.step:Step.is_decode",
            "nanovllm.engine.feature:Feature",
            "nanovllm.engine.scheduler:Scheduler.__init__",
        ),
        functions="""
            nanovllm.engine.scheduler:Scheduler.reset
            nanovllm.engine.scheduler:Scheduler.schedule
            nanovllm.engine.scheduler:Scheduler.plan
            nanovllm.engine.scheduler:Scheduler._schedule_running
            nanovllm.engine.scheduler:Scheduler._grow
            nanovllm.engine.scheduler:Scheduler._schedule_waiting
            nanovllm.engine.scheduler:Scheduler._admit
            nanovllm.engine.scheduler:Scheduler._schedule_tokens
            nanovllm.engine.scheduler:Scheduler.preempt
            nanovllm.engine.scheduler:Scheduler.advance
            nanovllm.engine.scheduler:Scheduler.postprocess
            nanovllm.engine.sequence:Sequence.check_end
            nanovllm.engine.scheduler:Scheduler.finish
            nanovllm.engine.scheduler:Scheduler._release
            nanovllm.engine.scheduler:PrefillFirstScheduler.plan
        """.split(),
        tests=(
            "tests/engine/test_scheduler.py",
            "tests/engine/test_scheduled_sequences.py",
            "tests/engine/test_scheduler_features.py",
        ),
        exercise=2,
    ),
    Evening(
        number=3,
        title="Prefix caching",
        page="nanovllm/course/3_prefix_cache.md",
        scene="step 3 of timeline.html: which blocks are shared, cached, or duplicates",
        reading=("nanovllm/engine/block_manager.py",),
        functions="""
            nanovllm.engine.block_manager:BlockManager.get_tokens
            nanovllm.engine.block_manager:BlockManager.compute_hash
            nanovllm.engine.block_manager:BlockManager.find_root
            nanovllm.engine.block_manager:BlockManager.hash_block
            nanovllm.engine.block_manager:BlockManager.cache_block
            nanovllm.engine.block_manager:BlockManager.cache_full_blocks
            nanovllm.engine.block_manager:BlockManager.uncache
            nanovllm.engine.block_manager:BlockManager.find_block
            nanovllm.engine.block_manager:BlockManager.find_prefix
            nanovllm.engine.block_manager:BlockManager.share
            nanovllm.engine.block_manager:BlockManager.allocate
            nanovllm.engine.block_manager:BlockManager.release_block
        """.split(),
        tests=("tests/engine/test_block_manager.py", "tests/engine/test_scheduler.py"),
        exercise=4,
    ),
    Evening(
        number=4,
        title="One batch through the model",
        page="nanovllm/course/4_batch.md",
        scene="step 3 of timeline.html: the arrays of the batch, and its rows of logits",
        reading=(
            "nanovllm.engine.step:Step",
            "nanovllm.batch.batch:Batch",
            "nanovllm/models/decoder.py",
        ),
        functions="""
            nanovllm.engine.model_runner:ModelRunner.prepare_batch
            nanovllm.engine.step:Step.list_rows
            nanovllm.engine.step:Step.split
            nanovllm.engine.step:Step.drop_ended
            nanovllm.layers.norm:RMSNorm.normalize
            nanovllm.layers.rotary:apply_rotary
            nanovllm.models.decoder:Attention.norm_and_rotate
            nanovllm.models.decoder:Attention.attend
            nanovllm.models.decoder:Attention.forward
            nanovllm.models.decoder:MLP.forward
            nanovllm.models.decoder:DecoderLayer.forward
            nanovllm.models.decoder:DecoderLayers.forward
            nanovllm.models.decoder:Decoder.forward
        """.split(),
        tests=(
            "tests/engine/test_oracle.py::test_a_batch_looks_as_drawn_in_batch_py",
            "tests/engine/test_oracle.py::test_a_token_and_its_draft_can_enter_a_block",
            "tests/engine/test_oracle.py::test_more_rows_can_be_wanted_than_are_sampled",
            "tests/engine/test_oracle.py::test_a_pending_token_is_passed_on",
            "tests/engine/test_step.py",
            "tests/layers/test_norm_and_rotary.py",
            "tests/models/test_decoder.py",
            "tests/engine/test_oracle.py::test_grid",
        ),
        exercise=5,
    ),
    Evening(
        number=5,
        title="Sampling",
        page="nanovllm/course/5_sampling.md",
        scene="step 3 of timeline.html: how many tokens are sampled, and at which positions",
        reading=(
            "nanovllm/sampling_params.py",
            "nanovllm.batch.batch:Filters",
            "nanovllm.features.structured_outputs.masks:compute_mask",
        ),
        functions="""
            nanovllm.layers.noise:make_noise_keys
            nanovllm.layers.noise:gumbel_noise
            nanovllm.layers.sampler:make_sampling_batch
            nanovllm.layers.sampler:find_best
            nanovllm.layers.sampler:filter_logits
            nanovllm.layers.sampler:Sampler.filter
            nanovllm.layers.sampler:Sampler.draw
            nanovllm.layers.sampler:Sampler.forward
            nanovllm.layers.penalties:penalize
            nanovllm.layers.penalties:apply_penalties
            nanovllm.layers.logprobs:find_logprobs
            nanovllm.layers.logprobs:read_logprobs
            nanovllm.features.structured_outputs.masks:apply_grammars
        """.split(),
        tests=(
            "tests/layers/test_sampler.py",
            "tests/layers/test_penalties.py",
            "tests/layers/test_logprobs.py",
            "tests/kernels/test_sampler_kernels.py::test_optimized_sampler_draws_the_same_tokens",
            "tests/features/test_structured.py::test_regex_choice_and_grammar",
            "tests/features/test_structured.py::test_samples_of_a_batch",
            "tests/features/test_structured.py::test_a_row_without_an_allowed_token_becomes_nan",
        ),
        exercise=15,
    ),
    Evening(
        number=6,
        title="Drafts and states",
        page="nanovllm/course/6_drafts_and_states.md",
        scene="the picture of drafts.py: which tokens a step with a draft gives",
        reading=(
            "nanovllm/engine/feature.py",
            "nanovllm/worker/state_slots.py",
            "nanovllm.features.recurrent_states:Slots",
        ),
        functions="""
            nanovllm.features.speculation.drafts:count_matches
            nanovllm.features.speculation.proposers:PromptLookup.propose
            nanovllm.features.speculation.drafts:Proposal.learn
            nanovllm.features.speculation.drafts:Drafts.planned
            nanovllm.features.speculation.drafts:Drafts._verify
            nanovllm.features.speculation.drafts:Drafts.sampled
            nanovllm.features.speculation.drafts:Drafts.advanced
            nanovllm.features.speculation.costs:StepCosts.choose_count
            nanovllm.features.recurrent_states:RecurrentStates.limit_prefix
            nanovllm.features.recurrent_states:RecurrentStates.limit_tokens
            nanovllm.features.recurrent_states:RecurrentStates._begin_snapshot
            nanovllm.features.recurrent_states:RecurrentStates.take_slot
            nanovllm.features.recurrent_states:RecurrentStates.planned
            nanovllm.features.recurrent_states:RecurrentStates.advanced
        """.split(),
        tests=(
            "tests/features/test_speculation.py",
            "tests/features/test_recurrent_states.py",
            "tests/models/test_qwen3_5.py::test_a_shared_prefix_is_computed_twice",
            "tests/models/test_qwen3_5.py::test_snapshots_are_evicted",
            "tests/models/test_qwen3_5.py::test_drafts_change_no_token",
        ),
        exercise=11,
    ),
    Evening(
        number=7,
        title="Tensor parallelism and quantized weights",
        page="nanovllm/course/7_ranks_and_weights.md",
        scene="the roofline: tokens/s of a decode in bfloat16 and in int4",
        reading=(
            "nanovllm/layers/linear.py",
            "nanovllm/layers/tensor_parallel.py",
            "nanovllm.layers.quantized:Scheme",
        ),
        functions="""
            nanovllm.layers.tensor_parallel:TensorParallel.divide
            nanovllm.layers.tensor_parallel:TensorParallel.all_reduce
            nanovllm.layers.tensor_parallel:TensorParallel.gather
            nanovllm.layers.linear:ColumnParallelLinear.forward
            nanovllm.layers.linear:RowParallelLinear.forward
            nanovllm.layers.linear:RowParallelLinear.targets
            nanovllm.layers.embedding:Embedding.look_up
            nanovllm.layers.embedding:Embedding.forward
            nanovllm.layers.embedding:Embedding.logits
            nanovllm.layers.quantized:unpack
            nanovllm.layers.quantized:QuantizedWeight.from_codes
            nanovllm.layers.quantized:QuantizedWeight.quantize
            nanovllm.layers.quantized:QuantizedWeight.dequantize
            nanovllm.worker.cache_plan:find_budget
            nanovllm.worker.cache_plan:CachePlanner.count_lane_bytes
            nanovllm.worker.cache_plan:CachePlanner.count_lanes
            nanovllm.benchmark.roofline:compute_step_seconds
        """.split(),
        tests=(
            "tests/layers/test_tensor_parallel.py",
            "tests/checkpoints/test_quantization.py::test_codes_are_the_nearest",
            "tests/checkpoints/test_quantization.py::"
            "test_codes_scales_and_zeros_of_a_checkpoint_are_kept",
            "tests/checkpoints/test_quantization.py::test_the_largest_code_does_not_overflow",
            "tests/checkpoints/test_quantization.py::test_a_part_of_a_weight_is_indexed_as_a_tensor",
            "tests/checkpoints/test_quantization.py::test_a_scale_of_1_is_exact",
            "tests/checkpoints/test_quantization.py::test_a_dequantized_weight_is_rounded_once",
            "tests/worker/test_kv_cache_size.py",
            "tests/benchmark/test_bench.py::test_roofline_counts_necessary_flops_and_bytes",
            "tests/benchmark/test_bench.py::test_roofline_does_not_compute_a_cached_prefix",
            "tests/benchmark/test_bench.py::test_roofline_counts_recurrent_states",
            "tests/benchmark/test_bench.py::test_roofline_counts_what_the_option_quantizes",
            "tests/benchmark/test_bench.py::"
            "test_roofline_reads_the_experts_of_all_tokens_and_multiplies_by_those_of_each",
            "tests/benchmark/test_bench.py::test_roofline_reads_a_head_in_its_own_format",
            "tests/benchmark/test_bench.py::test_a_step_is_bound_by_flops_or_by_bytes_as_a_whole",
        ),
        exercise=9,
    ),
    Evening(
        number=8,
        title="A kernel of your own",
        page="nanovllm/course/8_kernel.md",
        scene="how many bytes of K/V the programs of a decode ask for",
        reading=("nanovllm/layers/attention.py", "nanovllm.course.own_kernel:attend_split"),
        functions="""
            nanovllm.course.own_kernel:store_kernel
            nanovllm.course.own_kernel:find_rows
            nanovllm.course.own_kernel:attend_whole_kernel
            nanovllm.course.own_kernel:attend_range
            nanovllm.course.own_kernel:attend_split_kernel
            nanovllm.course.own_kernel:combine_kernel
            nanovllm.course.own_kernel:attend
        """.split(),
        tests=("tests/kernels/test_own_kernel.py",),
        exercise=6,
    ),
)
