"""The part that the fast suite runs: calls of every area, on one device and in host memory."""

from __future__ import annotations

from tests.generated.search.differential.table import Entry, entries

CALLS = (
    "states/load_own_state",
    "states/load_own_state[strict=False]",
    "states/load_own_state[assign]",
    "states/load_other_state",
    "states/best_weights_in_memory",
    "states/bad_state[shape]",
    "states/save_and_load",
    "states/whole_model_file",
    "states/deep_copy[used]",
    "moves/to_dtype[float16]",
    "moves/cast_to_own_dtype[to]",
    "moves/to_cpu[to]",
    "moves/under[inference_mode]",
    "forward/plain",
    "forward/batches[padded]",
    "forward/embeddings[text]",
    "forward/turns[dynamic]",
    "generate/main_modes[greedy]",
    "generate/main_modes[beams]",
    "generate/several_of_several[beams]",
    "generate/from_embeddings[text]",
    "accelerate/prepare",
    "accelerate/prepare[loader]",
    "accelerate/saved_state_inference[pickle]",
    "accelerate/saved_state_training[pickle]",
    "training/step",
    "training/evaluate",
    "training/trainer",
    "embedding/resize[more]",
    "embedding/new_tokens_lora[auto]",
    "hooks/threads[forward]",
    "hooks/hook[forward]",
    "loading/config_name[head_dim]",
    "loading/bad_folder[folder]",
    "loading/from_pretrained[sdpa]",
    "adapters/peft_load",
    "adapters/model_load",
    "adapters/bad_model_load[folder]",
    "adapters/bad_model_load[rank]",
    "adapters/bad_peft_load[folder]",
    "adapters/merge_adapter",
    "adapters/merged_tied[lm_head]",
    "adapters/hotswap",
    "adapters/mixed_model[from_pretrained]",
    "adapters/tuner[lora]",
    "quantized/config[nf4]",
    "quantized/config[8bit]",
    "quantized/lines_said",
    "package/decode_fast_tuner[prefix]",
    "package/decode_fast[greedy]",
    "package/replayed_and_switched[ln]",
    "package/chunked_loss[none]",
    "package/chunked_sharded[head]",
)


def part() -> list[Entry]:
    """Each of the calls on its first kind of model."""
    places = ("one", "ram")
    found = [entry for entry in entries() if entry.call.name in CALLS and entry.place in places]
    return [entry for entry in found if entry.kind == entry.call.kinds[0]]
