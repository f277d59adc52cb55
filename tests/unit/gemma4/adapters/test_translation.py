"""Keys of adapter files against a model's modules: names only, no torch."""

from __future__ import annotations

import pytest

from gemma4_compat._gemma4.adapters.translation import Translation, module_name, translate

LAYER = (
    "self_attn",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp",
    "mlp.up_proj",
)
SHARED = tuple(name for name in LAYER if not name.endswith(("k_proj", "v_proj")))  # layer 1 has no keys of its own
TEXT = (
    "embed_tokens",
    "norm",
    "layers",
    *("layers.0", *(f"layers.0.{name}" for name in LAYER)),
    *("layers.1", *(f"layers.1.{name}" for name in SHARED)),
)
TOWER = ("layers", "layers.0", "layers.0.self_attn", "layers.0.self_attn.q_proj", "layers.0.self_attn.q_proj.linear")
BARE_TEXT = ("", *TEXT)
CAUSAL = ("", "model", *(f"model.{name}" for name in TEXT), "lm_head")
BARE = (
    "",
    "language_model",
    *(f"language_model.{name}" for name in TEXT),
    "vision_tower",
    *(f"vision_tower.{name}" for name in TOWER),
    "embed_vision",
    "embed_vision.embedding_projection",
)
MULTIMODAL = ("", "model", *(f"model.{name}" for name in BARE if name), "lm_head")
CLASSES = {"causal": CAUSAL, "multimodal": MULTIMODAL, "bare": BARE, "bare text": BARE_TEXT}
STEM = {"causal": "model.", "multimodal": "model.language_model.", "bare": "language_model.", "bare text": ""}
P = "base_model.model."


def one(key: str, modules: tuple[str, ...], *more: str) -> str | None:
    return translate([key, *more], modules).names.get(key)


@pytest.mark.parametrize("target", CLASSES)
@pytest.mark.parametrize("source", CLASSES)
def test_every_class_reads_what_every_class_wrote(source: str, target: str) -> None:
    rest = "layers.0.self_attn.q_proj.lora_A.weight"
    key, name = f"{P}{STEM[source]}{rest}", f"{P}{STEM[target]}{rest}"
    found = translate([key], CLASSES[target])
    assert found.names == {key: name}
    assert found.is_identity == (source == target)
    assert found.modules[key] == (f"{STEM[source]}{rest[:-14]}", f"{STEM[target]}{rest[:-14]}")


@pytest.mark.parametrize(
    "prefix",
    ["", "model.", "base_model.", P, P + "model.", P + P, P + P + "model.", P + "language_model.model.", "module." + P,
     P + "_orig_mod.model.", "language_model.model.", P + "model.model.language_model."],
)  # fmt: skip
def test_prefixes_of_other_tools(prefix: str) -> None:
    for target, modules in CLASSES.items():
        rest = "layers.0.mlp.up_proj.lora_B.weight"
        assert one(prefix + rest, modules) == f"{P}{STEM[target]}{rest}"


@pytest.mark.parametrize(
    ("parameter", "left"),
    [
        ("lora_A.weight", "lora_A.default.weight"),
        ("lora_embedding_A", "lora_embedding_A.default"),
        ("lora_magnitude_vector", "lora_magnitude_vector.default"),
        ("lora_magnitude_vector.weight", "lora_magnitude_vector.default.weight"),
        ("hada_w1_a", "hada_w1_a.default"),
        ("lokr_w2", "lokr_w2.default"),
        ("ia3_l", "ia3_l.default"),
        ("vera_lambda_b", "vera_lambda_b.default"),
        ("oft_R.weight", "oft_R.default.weight"),
        ("boft_s", "boft_s.default"),
        ("token_adapter.trainable_tokens_delta", "token_adapter.trainable_tokens_delta.default"),
        ("trainable_tokens_delta", "trainable_tokens_delta.default"),
        ("base_layer.lora_A.weight", "base_layer.lora_A.default.weight"),
        ("base_layer.base_layer.lora_B.weight", "base_layer.base_layer.lora_B.default.weight"),
        ("base_layer.weight", "base_layer.weight"),
        ("weight", "modules_to_save.default.weight"),
        ("weight", "modules_to_save.weight"),
        ("a_tuner_of_tomorrow.scale", "a_tuner_of_tomorrow.default.scale"),
    ],
)
def test_parameters_of_any_tuner_with_and_without_the_adapters_name(parameter: str, left: str) -> None:
    stem, here = f"{P}model.layers.0.", f"{P}model.language_model.layers.0."
    for written in {left, parameter}:
        found = translate([f"{stem}{module}.{written}" for module in ("mlp.up_proj", "self_attn.q_proj")], MULTIMODAL)
        assert list(found.names.values()) == [f"{here}mlp.up_proj.{parameter}", f"{here}self_attn.q_proj.{parameter}"]


def test_an_adapters_name_is_only_what_all_keys_have() -> None:
    keys = [f"{P}model.layers.0.mlp.up_proj.glora_A.{part}" for part in ("Xd", "Xu")]
    assert list(translate(keys, CAUSAL).names.values()) == keys
    keys = [f"{P}model.layers.0.mlp.up_proj.lora_{part}.poet.weight" for part in "AB"]
    assert list(translate(keys, CAUSAL).names.values()) == [key.replace(".poet", "") for key in keys]
    keys = [f"{P}model.layers.0.mlp.up_proj.adamss_{part}.0" for part in "AB"]
    assert list(translate(keys, CAUSAL).names.values()) == keys


def test_parameters_that_are_experts_themselves() -> None:
    """``target_parameters``: the experts have weights and a child without any, and both are in one file or alone."""
    extra = ("layers.0.experts", "layers.0.experts.act_fn", "layers.0.router", "layers.0.router.proj")
    modules = {name: (*found, *(STEM[name] + module for module in extra)) for name, found in CLASSES.items()}
    ends = ("base_layer.lora_A.weight", "base_layer.lora_B.weight", "lora_A.weight", "lora_B.weight")
    for source in CLASSES:
        keys = [f"{P}{STEM[source]}layers.0.experts.{end}" for end in ends]
        assert translate(keys, modules[source]).is_identity
        for target in CLASSES:
            wanted = [f"{P}{STEM[target]}layers.0.experts.{end}" for end in ends]
            for written in (keys, [key.replace(".weight", ".default.weight") for key in keys]):
                found = translate(written, modules[target])
                assert list(found.names.values()) == wanted
                assert found.unmatched == ()
                assert set(found.modules.values()) == {
                    (f"{STEM[source]}layers.0.experts", f"{STEM[target]}layers.0.experts")
                }
    alone = f"{P}model.layers.0.experts.7.up_proj.lora_A.weight"  # each expert a module of its own
    assert translate([alone], modules["causal"]).unmatched == (alone,)
    beside = f"{P}model.layers.0.experts.lora_A.weight"
    assert translate([beside, alone], modules["causal"]).unmatched == (alone,)
    assert translate([beside], CAUSAL).unmatched == (beside,)  # a model without experts


def test_a_clipped_linear_and_its_inner_layer() -> None:
    name = f"{P}model.vision_tower.layers.0.self_attn.q_proj.linear.lora_A.weight"
    assert translate([name], MULTIMODAL).is_identity
    assert one(name.replace(".linear", ""), MULTIMODAL) == name
    plain = tuple(module for module in MULTIMODAL if not module.endswith(".linear"))
    assert one(name, plain) == name.replace(".linear", "")
    for suffix in ("input_min", "modules_to_save.input_min", "modules_to_save.default.linear.weight"):
        expected = name.replace("linear.lora_A.weight", suffix.split(".", 1)[-1].removeprefix("default."))
        assert one(name.replace("linear.lora_A.weight", suffix), MULTIMODAL) == expected


def test_keys_of_kv_shared_layers_are_dead_and_others_are_not() -> None:
    keys = [f"{P}model.layers.{n}.self_attn.{name}.lora_A.weight" for n in (0, 1) for name in ("q_proj", "k_proj")]
    found = translate(keys, MULTIMODAL)
    assert found.unused == (keys[3],)
    assert found.unmatched == ()
    assert len(found.names) == 3
    with_k = (*(name for name in MULTIMODAL), "model.language_model.layers.1.self_attn.k_proj")
    missing = f"{P}model.layers.1.self_attn.v_proj.lora_A.weight"  # its values are its keys: nothing is shared
    assert translate([missing], with_k).unmatched == (missing,)


@pytest.mark.parametrize(
    "key",
    [
        P + "model.layers.7.self_attn.q_proj.lora_A.weight",
        P + "model.layers.0.self_attn.qkv_proj.lora_A.weight",
        P + "model.layers.0.self_attn.qkv_proj.weight",
        P + "transformer.h.0.attn.c_attn.lora_A.weight",
        P + "model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight",
        "lora_unet_down_blocks_0.lora_down.of.weight",
    ],
)
def test_what_belongs_nowhere_is_said(key: str) -> None:
    good = f"{P}model.layers.0.mlp.up_proj.lora_A.weight"
    assert translate([good, key], CAUSAL).unmatched == (key,)
    assert translate([key], CAUSAL) == Translation({}, (), (key,), {})


def test_what_is_of_no_module_stays_as_it_is() -> None:
    for key in ("prompt_embeddings", "base_model.vera_A", "base_model.tinylora_v.0"):
        assert translate([key], MULTIMODAL) == Translation({key: key}, (), (), {})


def test_a_parameter_on_a_container() -> None:
    key = f"{P}model.layers.0.self_attn.adaption_prompt"
    assert one(key, MULTIMODAL) == key.replace("model.layers", "model.language_model.layers")
    key = f"{P}embed_vision.modules_to_save.default.embedding_projection.weight"
    assert one(key, MULTIMODAL) == f"{P}model.embed_vision.embedding_projection.weight"


def test_two_keys_of_one_tensor() -> None:
    right = f"{P}model.vision_tower.layers.0.self_attn.q_proj.linear.lora_A.weight"
    wrong = right.replace(".linear", "")
    for keys in ([right, wrong], [wrong, right]):
        found = translate(keys, MULTIMODAL)
        assert found.names == {right: right}
        assert found.unmatched == (wrong,)


def test_names_of_modules() -> None:
    assert module_name("model.layers.0.mlp.up_proj", MULTIMODAL) == "model.language_model.layers.0.mlp.up_proj"
    assert module_name("lm_head", MULTIMODAL) == "lm_head"
    assert module_name("model.layers.0.mlp.sideways_proj", MULTIMODAL) is None
    assert module_name("up_proj", MULTIMODAL) is None


def test_an_empty_file() -> None:
    assert translate([], CAUSAL) == Translation({}, (), (), {})


def test_the_embedding_below_trained_tokens_keeps_its_name() -> None:
    key = "base_model.model.model.embed_tokens.token_adapter.base_layer.weight"
    found = translate([key], ["model", "model.embed_tokens"])
    assert found.names == {key: key}
