"""``generate`` in every mode and with every input."""

from __future__ import annotations

from typing import Any

from tests.generated.search.differential.table import ALL, EVERYWHERE, Area, Expect
from tests.generated.search.differential.world import World

area = Area("generate")
SOME = ("E2B", "E2B-lora", "E2B-text", "12B")
EXACT = ("E2B", "E2B-4bit", "12B", "31B")

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "temperature": 1.3, "top_k": 50},
    "top_p": {"do_sample": True, "top_p": 0.7},
    "min_p": {"do_sample": True, "min_p": 0.1},
    "typical_p": {"do_sample": True, "typical_p": 0.5},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 0.001},
    "eta_cutoff": {"do_sample": True, "eta_cutoff": 0.001},
    "beams": {"num_beams": 2},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "beams_returned": {"num_beams": 3, "num_return_sequences": 2},
    "early_stopping": {"num_beams": 2, "early_stopping": True, "length_penalty": 0.5},
    "returned": {"do_sample": True, "num_return_sequences": 3},
    "group_beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5], [6, 7]]},
    "force_words": {"force_words_ids": [[9]], "num_beams": 2},
    "suppress": {"suppress_tokens": [10, 11, 12]},
    "begin_suppress": {"begin_suppress_tokens": [10, 11]},
    "forced_bos": {"forced_bos_token_id": 5},
    "forced_eos": {"forced_eos_token_id": 1},
    "eos_list": {"eos_token_id": [1, 106, 50]},
    "guidance_scale": {"guidance_scale": 1.5},
    "sequence_bias": {"sequence_bias": {(5,): 3.0}},
    "exponential_decay": {"exponential_decay_length_penalty": (1, 1.1)},
    "renormalize": {"renormalize_logits": True, "do_sample": True},
    "remove_invalid": {"remove_invalid_values": True},
    "prompt_lookup": {"prompt_lookup_num_tokens": 2},
    "use_cache=False": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "static_eager": {"cache_implementation": "static", "disable_compile": True},
    "offloaded": {"cache_implementation": "offloaded"},
    "offloaded_static": {"cache_implementation": "offloaded_static"},
    "dynamic": {"cache_implementation": "dynamic"},
    "dynamic_full": {"cache_implementation": "dynamic_full"},
    "hybrid": {"cache_implementation": "hybrid"},
    "sliding_window": {"cache_implementation": "sliding_window"},
    "quantized": {"cache_implementation": "quantized"},
    "paged": {"cache_implementation": "paged"},
    "absent_cache": {"cache_implementation": "no such cache"},
    "static_beams": {"cache_implementation": "static", "num_beams": 2},
    "prefill_chunks": {"prefill_chunk_size": 8},
    "max_length": {"max_new_tokens": None, "max_length": 30, "min_new_tokens": None},
    "max_time": {"max_time": 100.0},
    "dola": {"dola_layers": "low"},
    "watermark": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}},
    "token_healing": {"token_healing": True},
    "stop_strings": {"stop_strings": ["a"]},
    "compile": {"compile_config": None, "disable_compile": False},
    "absent_option": {"no_such_option": 1},
    "bad_temperature": {"do_sample": True, "temperature": -1.0},
    "bad_length": {"max_new_tokens": -1},
}


@area.call(variants={name: {"options": options} for name, options in MODES.items()}, kinds=("E2B",))
def modes(world: World, options: dict[str, Any]) -> Any:
    """``generate`` with an option"""
    found = world.tokens(**options)
    if "prefill_chunk_size" not in options:
        return found
    return Expect(found, world.tokens(**{**options, "prefill_chunk_size": None}))  # some releases leave images out


_MAIN = {name: {"options": MODES[name]} for name in ("greedy", "sample", "beams", "static_eager", "prompt_lookup")}


@area.call(variants=_MAIN, kinds=(*ALL, "31B", "E2B-4bit-lora", "12B-4bit"), places=EVERYWHERE)
def main_modes(world: World, options: dict[str, Any]) -> Any:
    """``generate`` with an option, on every kind"""
    return world.tokens(**options)


@area.call(variants=["text", "padded", "batch"], kinds=SOME)
def prompts(world: World, how: str) -> Any:
    """``generate`` for prompts of text, and several"""
    import torch

    batch = {"text": {"media": False}, "padded": {"batch": 3, "padded": True}, "batch": {"batch": 3}}[how]
    with torch.no_grad():
        return world.model.generate(**world.inputs(**batch), max_new_tokens=4, do_sample=False, min_new_tokens=4)


@area.call(
    variants={"beams": {"num_beams": 2}, "sequences": {"do_sample": True, "top_k": 1, "num_return_sequences": 2}},
    kinds=("E2B", "12B", "31B"),
)
def several_of_several(world: World, **options: Any) -> Any:
    """Prompts with media of their own: each answers as it does by itself"""
    import torch

    first, second = world.inputs(), world.inputs()
    for name in ("pixel_values", "input_features"):
        if name in second:
            second[name] = second[name].flip(0).flip(-1) * 0.5
    both = {name: torch.cat([first[name], second[name]]) for name in first}
    given = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, **options}
    shown = dict(output_logits=True, return_dict_in_generate=True)
    with torch.no_grad():
        rows = [world.model.generate(**one, **given).cpu() for one in (first, second)]
        together = world.model.generate(**both, **given, **shown)
    return Expect(together.sequences, torch.cat(rows))


@area.call(variants=["scores", "logits", "hidden", "attentions", "dict"], kinds=("E2B", "E2B-lora", "12B"))
def outputs(world: World, what: str) -> Any:
    """What ``return_dict_in_generate`` returns"""
    given = {
        "scores": {"output_scores": True},
        "logits": {"output_logits": True},
        "hidden": {"output_hidden_states": True},
        "attentions": {"output_attentions": True},
        "dict": {},
    }[what]
    if what == "attentions":
        world.model.set_attn_implementation("eager")
    found = world.tokens(return_dict_in_generate=True, **given)
    key = {"hidden": "hidden_states", "dict": "sequences"}.get(what, what)
    return found[key]


@area.call(variants=["text", "media"], kinds=("E2B", "E2B-text", "12B", "31B", "E2B-lora"))
def from_embeddings(world: World, prompt: str) -> Any:
    """``generate(inputs_embeds=...)``: the tokens of ``input_ids``"""
    import torch

    batch = world.inputs(media=prompt == "media")
    given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        right = world.model.generate(**batch, **given)[:, batch["input_ids"].shape[1] :]
        batch["inputs_embeds"] = world.base.get_input_embeddings()(batch.pop("input_ids"))
        return Expect(world.model.generate(**batch, **given), right)


@area.call(kinds=("E2B", "E2B-text"))
def from_embeddings_and_per_layer(world: World) -> Any:
    """``generate(inputs_embeds=..., per_layer_inputs=...)``"""
    import torch

    batch = world.inputs(media=False)
    given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        right = world.model.generate(**batch, **given)[:, 24:]
        ids = batch.pop("input_ids")
        embedded = world.base.get_input_embeddings()(ids)
        per_layer = world.text.get_per_layer_inputs(ids, embedded)
        return Expect(
            world.model.generate(**batch, inputs_embeds=embedded, per_layer_inputs=per_layer, **given), right
        )


@area.call(variants=["dynamic", "static", "twice"], kinds=("E2B", "E2B-text", "12B", "31B"))
def on_a_cache(world: World, how: str) -> Any:
    """``generate(past_key_values=...)``, and a second turn on it"""
    import torch
    import transformers

    config = world.base.config
    cache = (
        transformers.StaticCache(config=config, max_cache_len=64)
        if how == "static"
        else transformers.DynamicCache(config=config)
    )
    first = world.tokens(media=False, past_key_values=cache)
    if how != "twice":
        return first
    with torch.no_grad():
        longer = torch.cat([first, torch.tensor([[7, 8, 9]])], dim=1)
        return world.model.generate(longer, past_key_values=cache, max_new_tokens=3, do_sample=False)


@area.call(variants=["streamer", "criteria", "processor", "config", "prefix", "custom"], kinds=SOME)
def with_object(world: World, what: str) -> Any:
    """``generate`` with an object of the user's"""
    import torch
    import transformers

    seen: list[Any] = []
    if what == "streamer":

        class Streamer(transformers.generation.streamers.BaseStreamer):
            def put(self, value: Any) -> None:
                seen.append(value.clone())

            def end(self) -> None:
                seen.append("end")

        return [world.tokens(streamer=Streamer()), seen]
    if what == "criteria":
        stop = transformers.StoppingCriteriaList([lambda ids, _scores: torch.ones(len(ids), dtype=torch.bool)])
        return world.tokens(stopping_criteria=stop, min_new_tokens=None)
    if what == "processor":
        add = transformers.LogitsProcessorList([lambda _ids, scores: scores.flip(-1)])
        return world.tokens(logits_processor=add)
    if what == "config":
        given = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=1)
        with torch.no_grad():
            return world.model.generate(**world.inputs(), generation_config=given)
    if what == "prefix":
        return world.tokens(prefix_allowed_tokens_fn=lambda _batch, _ids: [5, 6, 7])
    model = world.base
    return world.tokens(custom_generate=lambda _model, input_ids, **_: model(input_ids).logits.argmax(-1))


@area.call(variants=["greedy", "twice"], kinds=("E2B", "12B"))
def assisted(world: World, how: str) -> Any:
    """``assistant_model=``: greedy tokens are those without one"""
    right = world.tokens()
    try:
        assistant = world.workspace.load_assistant()
    except ImportError as error:
        world.needs(False, str(error))
    found = [world.tokens(assistant_model=assistant) for _ in range(2 if how == "twice" else 1)]
    return Expect(found, [right] * len(found))


@area.call(kinds=("E2B", "E2B-text"))
def assisted_by_sibling(world: World) -> Any:
    """``assistant_model=`` with a model of the same class"""
    other = world.workspace.load() if not world.text_class else world.workspace.load_text()
    right = world.tokens(media=False)
    return Expect(world.tokens(media=False, assistant_model=other), right)


@area.call(kinds=("E2B", "E2B-4bit", "12B", "31B", "E2B-text"))
def again(world: World) -> Any:
    """``generate`` three times: prompts of other lengths between"""
    import torch

    first = world.tokens()
    with torch.no_grad():
        short = world.model.generate(torch.tensor([[2, 5, 6]]), max_new_tokens=3, do_sample=False)
    return [first, short, world.tokens()]


@area.call(kinds=("E2B", "E2B-text", "12B"))
def long_answers(world: World) -> Any:
    """60 new tokens, past the sliding window"""
    return world.tokens(max_new_tokens=60, min_new_tokens=60)


@area.call(variants=["no_prompt", "empty", "bos"], kinds=("E2B", "E2B-text"))
def odd_prompts(world: World, how: str) -> Any:
    """``generate`` without a prompt, with an empty one, with one token"""
    import torch

    ids = {"no_prompt": None, "empty": torch.zeros(1, 0, dtype=torch.long), "bos": torch.tensor([[2]])}[how]
    with torch.no_grad():
        given = {"max_new_tokens": 3, "do_sample": False}
        return world.model.generate(**given) if ids is None else world.model.generate(ids, **given)


@area.call(kinds=("E2B", "E2B-text", "12B"))
def continuous_batching(world: World) -> Any:
    """``generate_batch``: the tokens of ``generate``"""
    import torch
    import transformers

    world.needs(hasattr(world.model, "generate_batch"), "no generate_batch")
    ids = world.inputs(media=False)["input_ids"]
    given = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = world.model.generate_batch(inputs=[ids[0].tolist()], generation_config=given)
    with torch.no_grad():
        right = world.model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, 24:]
    return Expect([list(item.generated_tokens) for item in found.values()], [right.tolist()])


@area.call(kinds=("E2B", "12B"))
def train_mode(world: World) -> Any:
    """``generate`` of a model in training mode"""
    world.model.train()
    return world.tokens()


@area.call(kinds=("E2B",))
def checkpointed(world: World) -> Any:
    """``generate`` of a model with gradient checkpointing"""
    world.model.gradient_checkpointing_enable()
    world.model.train()
    return world.tokens()


@area.call(kinds=("E2B", "E2B-lora", "12B"))
def decoded_step_by_step(world: World) -> Any:
    """The usual loop: forward, argmax, cache"""
    import torch

    batch = world.inputs()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache, shown = None, []
    with torch.no_grad():
        for _ in range(4):
            output = world.model(**batch, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            ids = output.logits[:, -1:].argmax(-1)
            shown.append(ids)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            batch = {"input_ids": ids, "attention_mask": mask}
    return shown


@area.call(kinds=("E2B",))
def generation_config_saved(world: World) -> Any:
    """``generation_config`` of a saved model"""
    import transformers

    world.model.generation_config.max_new_tokens = 7
    folder = world.new_folder()
    world.model.save_pretrained(folder)
    return transformers.GenerationConfig.from_pretrained(folder).max_new_tokens
