"""What a running server is asked for besides answers, and --kv-quant oscar refuses: other weights, sleep, and prompts that
would end SGLang's scheduler. A refusal reaches the client as status 400 with a sentence, and the server goes on.

Requests for new weights are refused twice: in the process that speaks HTTP, before anything is sent to the schedulers, and in
the scheduler, for front ends that are not SGLang's (gRPC).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.oscar.flags import settings_of

_RESTART = "restart the server with the new weights and an artifact that was calibrated for them"
NEW_WEIGHTS = (
    "--kv-quant oscar: weights cannot change under a 2-bit cache that was calibrated for the old ones, whose V transform is "
    f"folded into them; {_RESTART}"
)
SHARED_WEIGHTS = (
    "--kv-quant oscar: the weights of this server cannot be read out, because the V transform of its 2-bit cache is folded "
    "into them; read them from the model's files, or serve with --kv-quant none"
)
SLEEP = (
    "--kv-quant oscar: this server cannot release its memory, because the 16-bit windows and native layers lie outside what "
    "the memory saver releases and restores; stop the server, or serve with --kv-quant none"
)
WEIGHTS_ARE_RESET = (
    "--kv-quant oscar: the action reset_tensors overwrites the weights, into which the V transform is folded; use the action "
    "checksum, snapshot or compare, or serve with --kv-quant none"
)

FRONT = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

# Method of the front end -> what it answers instead.
_PAIRS = {
    f"{FRONT}.{name}": sentence
    for sentence, names in (
        (
            NEW_WEIGHTS,
            (
                "begin_weight_update",
                "end_weight_update",
                "init_weights_update_group",
                "destroy_weights_update_group",
                "update_weights_from_distributed",
                "update_weights_from_tensor",
                "update_weights_from_ipc",
            ),
        ),
        (SHARED_WEIGHTS, ("init_weights_send_group_for_remote_instance", "send_weights_to_remote_instance")),
    )
    for name in names
}
_RAISED = {
    f"{FRONT}.get_weights_by_name": SHARED_WEIGHTS,
    f"{FRONT}.release_memory_occupation": SLEEP,
    f"{FRONT}.resume_memory_occupation": SLEEP,
}
# Method of the scheduler -> class of its answer in `io_struct`.
_SCHEDULER = {
    "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    "update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
    "begin_weight_update": "BeginWeightUpdateReqOutput",
    "end_weight_update": "EndWeightUpdateReqOutput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqOutput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqOutput",
}


def hooks() -> dict[str, Callable]:
    """Dotted path of a method of SGLang -> the function to put around it."""
    from sglang.srt.managers import io_struct

    result: dict[str, Callable] = {
        target: functools.partial(_answer, answer=(False, sentence)) for target, sentence in _PAIRS.items()
    }
    result[f"{TOKENIZER}.update_weights_from_disk"] = functools.partial(_answer, answer=(False, NEW_WEIGHTS, 0))
    result[f"{FRONT}.check_weights"] = _check_weights
    result |= {target: functools.partial(_raise, sentence=sentence) for target, sentence in _RAISED.items()}
    for name, output in _SCHEDULER.items():
        result[f"{UPDATER}.{name}"] = functools.partial(_refuse_in_scheduler, output=getattr(io_struct, output))
    for name in ("save_remote_model", "save_sharded_model"):
        result[f"{UPDATER}.{name}"] = _refuse_export
    result[f"{TOKENIZER}._validate_one_request"] = _check_prompt
    return result


def _is_ours(server_args: Any) -> bool:
    return settings_of(server_args) is not None


async def _answer(original, self, obj, request=None, *, answer: tuple):
    """AROUND a method of the front end that returns whether it succeeded and a message."""
    return answer if _is_ours(self.server_args) else await original(self, obj, request)


async def _raise(original, self, obj, request=None, *, sentence: str):
    """AROUND a method of the front end whose exceptions become status 400."""
    if _is_ours(self.server_args):
        raise ValueError(sentence)
    return await original(self, obj, request)


async def _check_weights(original, self, obj, request=None):
    """AROUND `check_weights`: everything but the action that overwrites weights."""
    if _is_ours(self.server_args) and obj.action == "reset_tensors":
        return False, WEIGHTS_ARE_RESET, None, None
    return await original(self, obj, request)


def _refuse_in_scheduler(original, self, recv_req, *, output: type):
    """AROUND a weight update in the scheduler."""
    if not _is_ours(self.tp_worker.model_runner.server_args):
        return original(self, recv_req)
    return output(success=False, message=NEW_WEIGHTS)


def _refuse_export(original, self, params):
    """AROUND the export of weights in the scheduler, which answers an exception with its message."""
    if _is_ours(self.tp_worker.model_runner.server_args):
        raise ValueError(SHARED_WEIGHTS)
    return original(self, params)


def _check_prompt(original, self, obj, input_ids):
    """AROUND the validation of one request: prompts on which SGLang's scheduler ends, with any KV cache, are refused here.

    Args:
        obj: the request.
        input_ids: its prompt, or None where it sends embeddings.
    Raises:
        ValueError: an empty prompt, or a token that the model does not have; the client gets status 400.
    """
    if input_ids is not None and _is_ours(self.server_args):
        if not len(input_ids) and getattr(obj, "input_embeds", None) is None:
            raise ValueError("the prompt has no tokens; send at least one")
        if getattr(obj, "input_ids", None) is not None:  # what the tokenizer made is in the vocabulary
            size = self.model_config.vocab_size
            if (bad := next((i for i in (min(input_ids), max(input_ids)) if not 0 <= i < size), None)) is not None:
                raise ValueError(f"input_ids: expected tokens from 0 to {size - 1}, got {bad}")
    return original(self, obj, input_ids)
