"""An assistant for the model: four layers that read its keys and values, and draft what it is about to say.

``python -m tools.trained_model.assistant`` trains it for the model of this checkout, writes it beside
it, and measures it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._lab.trained import Trained
from tools.trained_model import batches, files, measure, questions

_RATE, _ROWS, _SEED = 4e-3, 8, 85
STEPS = 600
#: Tokens drafted one after the other in training.
_DRAFTS = 4
#: Questions of each kind that are answered with drafts.
_ASKED = 20


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of another model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of {_ROWS} rows of {batches.LENGTH} tokens")
    chosen = parser.parse_args(argv)
    trained = Trained.find(chosen.folder)
    train(trained, chosen.steps, chosen.device)
    file = trained.folder / measure.FILE
    found = json.loads(file.read_text(encoding="utf-8")) | {"drafts": measured(trained)}
    measure.write(found, trained.folder)
    return measure.verdict(found)


def new(model: Any) -> Any:
    """An untrained assistant in float32, on the device of ``model``, a ``Gemma4ForConditionalGeneration``."""
    import torch
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    text = model.config.get_text_config()
    other = {
        "hidden_size": 64,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": False,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }
    left_out = ("architectures", "per_layer_config")
    given = {name: value for name, value in text.to_dict().items() if name not in left_out}
    torch.manual_seed(_SEED)
    made = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=type(text)(**given | other), backbone_hidden_size=text.hidden_size)
    )
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name.endswith("q_norm.weight"):  # as in the model
                value.fill_(value.numel() ** -0.5)
    return made.to(model.device)


def train(trained: Trained, steps: int, device: str) -> None:
    """Train it on what ``trained.checkpoint`` finds likeliest, and write ``trained.assistant`` in bfloat16."""
    import torch

    model = trained.load(dtype=torch.float32).to(device).eval()
    made = new(model).train()
    optimizer = torch.optim.AdamW(made.parameters(), lr=_RATE, weight_decay=0.0)
    draw = random.Random(_SEED)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min((step + 1) / 20, 1 - step / steps)
        loss, right = _read(model, made, batches.batch([batches.row(draw) for _ in range(_ROWS)], model))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            shares = [round(share, 3) for share in right.tolist()]
            print(json.dumps({"assistant step": step, "loss": round(loss.item(), 4), "right": shares}), flush=True)
    files.in_bfloat16(made).save_pretrained(trained.assistant)
    files.as_released(trained.assistant / "config.json")


def load(trained: Trained) -> Any:
    """``trained.assistant`` in bfloat16."""
    import torch
    from transformers import Gemma4AssistantForCausalLM

    return Gemma4AssistantForCausalLM.from_pretrained(str(trained.assistant), dtype=torch.bfloat16).eval()


def measured(trained: Trained) -> dict[str, Any]:
    """On questions that training did not draw: the share of right tokens for each of a round's drafts if all before it
    are given, and how many tokens a forward of the model gives with them, without the adapter and with it.
    """
    import torch
    from peft import PeftModel

    draw, model, made = random.Random(measure.SEED), trained.load(), load(trained)
    with torch.no_grad():
        _, right = _read(model, made, batches.batch([batches.row(draw) for _ in range(50)], model))
    asked = [questions.asked(draw, kind) for kind in measure.COMPARED for _ in range(_ASKED)]
    plain = tokens_a_forward(model, made, asked)
    adapted = PeftModel.from_pretrained(model, str(trained.adapter)).eval()
    found = {"tokens_a_forward": round(plain, 2), "with_adapter": round(tokens_a_forward(adapted, made, asked), 2)}
    return {"right": [round(share, 3) for share in right.tolist()], **found}


def tokens_a_forward(model: Any, assistant: Any, rows: list[batches.Row]) -> float:
    """How many tokens of greedy answers a forward of ``model`` gives, with so many drafts as in training."""
    import torch

    assistant.generation_config.num_assistant_tokens = _DRAFTS
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    forwards = tokens = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    handle = model.get_decoder().register_forward_pre_hook(count)
    try:
        for row in rows:
            batch = batches.batch([row], model)
            asked_with = int((batch.pop("labels") == batches.IGNORED).sum()) - 1  # tokens; a newline ends the row
            for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
                batch[name] = batch[name][:, :asked_with]
            with torch.no_grad():
                said = model.generate(**batch, do_sample=False, max_new_tokens=64, assistant_model=assistant)
            tokens += said.shape[1] - asked_with
    finally:
        handle.remove()
    return tokens / forwards


def _read(model: Any, assistant: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
    """The loss of drafts after every token before and in an answer, and which share of each draft is right.

    A draft after the token at p reads keys and values up to p - 1, and the model's last state there; all drafts of a
    round have that position.
    """
    import torch
    from torch.nn.functional import cross_entropy, pad

    labels = batch.pop("labels")
    with torch.no_grad():
        read = model(**batch, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    ids, said = batch["input_ids"], read.logits.argmax(-1)
    length = ids.shape[1]
    place = torch.arange(length, device=ids.device)
    before = place < place[:, None]
    near = before & (place[:, None] - place < model.config.get_text_config().sliding_window)
    before[0, 0] = near[0, 0] = True  # the first token has nothing before it, and no draft of it counts
    masks = {"full_attention": before[None, None], "sliding_attention": near[None, None]}
    hidden, losses, right = pad(read.hidden_states[-1], (0, 0, 1, 0))[:, :-1], [], []
    with in_place.replaced(assistant, "create_attention_masks", lambda *_: masks):
        for ahead in range(_DRAFTS):
            token = model.get_input_embeddings()(ids.roll(-ahead, 1))
            drafted = assistant(
                inputs_embeds=torch.cat((token, hidden), dim=-1),
                position_ids=place[None],
                shared_kv_states=read.shared_kv_states,
            )
            hidden = drafted.last_hidden_state
            kept = labels.roll(-ahead - 1, 1) != batches.IGNORED
            kept &= (place > 0) & (place < length - ahead - 1)
            expected = said.roll(-ahead, 1)
            losses.append(cross_entropy(drafted.logits[kept].float(), expected[kept]))
            right.append((drafted.logits.argmax(-1) == expected)[kept].float().mean())
    return torch.stack(losses).mean(), torch.stack(right)


if __name__ == "__main__":
    raise SystemExit(main())
