"""New weights between two steps, and an engine that sleeps while a trainer needs its memory.

    outputs = llm.generate(prompts, params)     logprobs are those of the current weights
    llm.sleep()                                 releases the KV cache, and a GPU's weights
    loss.backward(), optimizer.step()
    llm.update_weights(model.state_dict())      transformers' names
    llm.wake_up()

Each call takes its turn between two steps, so a trainer need not pause the engine. A sequence is
its tokens, and K/V are computed from them. An update therefore empties the KV cache, and running
sequences are recomputed with the new weights. So a trainer, which computes log probabilities of a
whole sequence with one set of weights, finds those that the engine reports for new tokens.

A CPU prepacks weights, so new ones go to a new model, which replaces the old one when it is
complete. On a GPU they are copied to the tensors whose addresses CUDA graphs have.
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

from nanovllm.checkpoints.checkpoint import read_config
from nanovllm.checkpoints.tensor_files import GivenTensors, TensorFiles
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.outputs import RequestOutput
from nanovllm.engine.request import Inbox
from nanovllm.features.thread_safety import ThreadSafeEngine
from nanovllm.models import weights
from nanovllm.utils.checks import check_choice, check_type
from nanovllm.worker.device import engine_settings
from nanovllm.worker.memory import release_free_memory
from nanovllm.worker.startup import allocate_caches, optimize, release_caches

_ASLEEP = "the engine is asleep: call wake_up() first"
_INCOMPLETE = "update_weights was interrupted, so the weights are incomplete: call it again"
POLL_INTERVAL = 0.01  # seconds between checks whether the engine is awake


class UpdatableEngine(ThreadSafeEngine):
    """An engine whose weights can be replaced, and which can sleep. It has one rank."""

    is_sleeping = False

    def update_weights(self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights. Unfinished requests go on with the tokens that they have.

        `tensors` have transformers' names, in any order, and any dtype of floats and device. Raises
        ValueError, and changes nothing, for missing, unexpected, repeated or misshapen tensors.
        """
        self._raise_if_stopped()
        worker = self.executor.worker
        self._check_one_rank()
        if worker.spec.quantization.format is not None:
            raise ValueError("update_weights needs a checkpoint that is not stored quantized")
        check_type("tensors", tensors, (Iterable,), GivenTensors.MEANING)
        pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        try:
            given = self._match(pairs)
        except ValueError:  # names of some families, such as Mixtral, differ from those in files
            # Modeling code of transformers takes seconds to import.
            from nanovllm.models.borrowed import find_stored_form

            stored = find_stored_form(read_config(worker.directory), dict(pairs))
            if stored is None:
                raise
            given = self._match(stored.items())
        self._take_turn(self._update_weights, given)

    def _match(self, tensors: Iterable[tuple[str, Tensor]]) -> GivenTensors:
        """Raise ValueError for what does not match the model, which is on `meta`."""
        worker = self.executor.worker
        given = GivenTensors(tensors)
        files = worker.open_weights() if worker.has_mtp_head else None
        if files is not None:
            given.add_mtp_head(files)
        with torch.inference_mode(False):
            model = weights.make_model(
                worker.spec, worker.backend, given, worker.tp, worker.has_mtp_head
            )
            weights.load_checkpoint(model, given)
        return given

    def _raise_if_stopped(self) -> None:
        """Raise RuntimeError if neither an update nor `wake_up` can let the engine go on."""
        if self.executor.stop_reason not in (_ASLEEP, _INCOMPLETE):
            self.executor.raise_if_stopped()

    def sleep(self, level: int = 1) -> None:
        """Release the KV cache. Weights of a GPU move to the host, or with level 2 are dropped.

        Calls that wait for outputs wait until `wake_up`. New ones raise RuntimeError.
        """
        check_choice("level", level, (1, 2))
        self._check_one_rank()
        self._take_turn(self._sleep, level)

    def wake_up(self) -> None:
        """End `sleep`. Weights that were dropped, and not updated, come from the checkpoint."""
        self._take_turn(self._wake_up)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Running sequences are recomputed."""
        self._take_turn(self._empty_cache)

    def step(self, inbox: Inbox | None = None) -> list[RequestOutput]:
        outputs = None
        while outputs is None:
            outputs = self._take_turn(self._step_unless_asleep, inbox)
            if outputs is None:
                time.sleep(POLL_INTERVAL)
        return outputs

    def _step_unless_asleep(self, inbox: Inbox | None) -> list[RequestOutput] | None:
        """Step, or return None if a caller who waits for outputs has to wait for `wake_up`."""
        if self.is_sleeping and inbox is not None:
            return None
        return LLMEngine.step(self, inbox)

    def _exit(self) -> None:
        if self.is_sleeping:
            self.executor.stop_reason = None  # so that exit() gives the reason
            self.is_sleeping = False
        super()._exit()

    def _empty_cache(self) -> None:
        self.executor.raise_if_stopped()
        with engine_settings(self.device):
            self._complete()
        self.scheduler.reset(self._list_requests())

    def _check_one_rank(self) -> None:
        if self.config.tensor_parallel_size > 1:
            raise ValueError("tensor_parallel_size must be 1 to update weights or to sleep")

    def _update_weights(self, given: GivenTensors) -> None:
        worker = self.executor.worker
        executor = self.executor
        self._raise_if_stopped()
        with engine_settings(self.device):
            self._complete()
        self._report_weights(is_original=False)  # first, because an interrupt can follow
        with engine_settings(self.device), torch.inference_mode(False):
            if self.device.type == "cpu" or worker.model is None:
                self._replace_model(given)
            else:
                executor.stop_reason = _INCOMPLETE
                weights.load_checkpoint(worker.model, given)
        executor.stop_reason = _ASLEEP if self.is_sleeping else None
        self.scheduler.reset(self._list_requests())
        if self.features.weights_changed and self._are_original(given):
            self._report_weights(is_original=True)

    def _are_original(self, given: GivenTensors) -> bool:
        """Return whether these are the weights of the checkpoint, as far as it is still there."""
        with suppress(OSError, ValueError):
            stored = self.executor.worker.open_weights()
            return stored is not None and stored.has_same(given)
        return False

    def _replace_model(self, files: TensorFiles | None) -> None:
        worker = self.executor.worker
        model = worker.load_model(files)
        optimize(worker, model)
        worker.model = model

    def _report_weights(self, is_original: bool) -> None:
        for feature in self.features.weights_changed:
            feature.weights_changed(is_original)

    @torch.inference_mode(False)  # weights stay ordinary tensors, which can be changed in place
    def _move_model(self, device: torch.device) -> None:
        self.executor.worker.model.to(device)

    def _sleep(self, level: int) -> None:
        if self.is_sleeping:
            return
        self._empty_cache()
        worker = self.executor.worker
        self.is_sleeping = True
        self.executor.stop_reason = _ASLEEP
        with engine_settings(self.device):
            if level == 2:
                worker.model = cast(Any, None)  # until an update, or wake_up
            else:
                self._move_model(torch.device("cpu"))
            release_caches(worker)
        release_free_memory()

    def _wake_up(self) -> None:
        if not self.is_sleeping:
            return
        if self.executor.stop_reason != _ASLEEP:
            self.executor.raise_if_stopped()
        worker = self.executor.worker
        with engine_settings(self.device):
            if worker.model is None:
                self._report_weights(is_original=False)
                with torch.inference_mode(False):
                    self._replace_model(worker.open_weights())
                self._report_weights(is_original=True)
            self._move_model(self.device)
            allocate_caches(worker, worker.plan, worker.plan.num_lanes)
        self.executor.stop_reason = None
        self.is_sleeping = False
