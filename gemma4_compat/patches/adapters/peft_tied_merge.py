"""An adapter on the head or the embedding is merged only into that one, not into the other, tied to it.

Symptom: silent: after ``merge_and_unload()`` or ``merge_adapter()`` of a LoRA on ``lm_head`` or ``embed_tokens`` the
model, and the checkpoint saved from it, give different outputs than the loaded adapter.

Cause: The head and the embedding of Gemma 4 are one parameter, and PEFT adds a layer's change to that parameter in
place. With ``ensure_weight_tying`` the same change is added twice.

Fix: Before the merge the head gets its own weight. If the two are equal afterwards, they become one parameter again;
if not, the unloaded model has ``tie_word_embeddings`` off, so that both are saved and loaded. ``unmerge_adapter`` ties
them again. The layers of a DiffusionGemma, which share their weights in pairs, are parted likewise; where weights stay
shared, that option stays on, with which transformers loads those that differ as they are. Trained tokens, which PEFT
puts on both, are left to it.

Remove when: PEFT unties two weights before it merges into one of them.
"""

from typing import Any

from gemma4_compat._gemma4.models import family
from gemma4_compat._offload.weights import merged_layers, stored_weights, tied_pairs
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F91", severity="wrong_result", affected=">=0.18.0", requires="transformers>=5.5")

ROUNDING = 0.01


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.merge_adapter")
def merge_adapter(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not family.has_parts(self.model):
        return original(self, *args, **kwargs)
    with merged_layers.parting(self.model):
        return original(self, *args, **kwargs)


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner._unload_and_optionally_merge")
@PATCH.replaces("peft.tuners.mixed.model", "MixedModel._unload_and_optionally_merge")
def unload_and_optionally_merge(original: Original, self: Any, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
    if not merge or not family.has_parts(self.model):
        return original(self, merge, *args, **kwargs)
    config: Any = self.model.config
    before = getattr(config, "tie_word_embeddings", None)
    with merged_layers.parting(self.model) as pairs:
        unloaded = original(self, merge, *args, **kwargs)
    if pairs:
        merged_layers.join(self.model)
        tied = all(stored_weights.is_same(*pair) for pair in pairs)
        others = [pair for pair in tied_pairs.pairs(unloaded) if pair not in pairs]
        # With others that are still tied, transformers compares those of a file: it ties what is equal.
        config.tie_word_embeddings = before if tied or others else False
    return unloaded


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.unmerge_adapter")
def unmerge_adapter(original: Original, self: Any) -> Any:
    result = original(self)
    if family.has_parts(self.model):
        merged_layers.join(self.model)
    return result


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import PeftModel

    from gemma4_compat._lab import tiny

    def loaded() -> Any:  # in float32 a merge hardly rounds
        return PeftModel.from_pretrained(workspace.load().float(), workspace.adapter_on("head", ["lm_head"])).eval()

    expected, model = workspace.outputs(loaded()), loaded()
    model.merge_adapter()
    found = workspace.difference(expected, model)
    model = loaded().merge_and_unload()
    found = max(found, workspace.difference(expected, model))
    folder = workspace.new_folder()
    model.save_pretrained(folder)
    saved = tiny.load(folder, device=workspace.main, cls=type(model).__name__, dtype=torch.float32)
    found = max(found, workspace.difference(expected, saved))
    what = "a LoRA on the head, merged, unloaded and saved"
    if found < ROUNDING:
        return Outcome(False, f"{what}: the outputs of the loaded adapter, rounded by {found:.1g}", found)
    return Outcome(True, f"{what}: logits differ by {found:.3g} from the loaded adapter", found)
