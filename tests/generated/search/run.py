"""What must hold for a case: it loads, keeps the placement, and gives the outputs of the same weights on one device.

The rule for placement: a parameter belongs to the most specific entry of the map that covers it. Under an offloaded
entry it is on meta between forwards, under any other on the main device. Buffers are on the main device (accelerate
offloads them only on request). Adapter weights are on the main device wherever their layer is. The tied weight of
head and embedding, where the map puts the two apart: the one that belongs on the main device is there; the other is
there too (it is the same tensor, offloading it would save nothing) or on meta.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import re
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat import Gemma4CompatWarning
from gemma4_compat._lab import tiny, tiny_adapters, tiny_configs, workspace
from tests.generated.search.case import MAIN, Case, is_complete, owner, simplifications, size

FORWARDS = 3
NEW_TOKENS = 4

#: LoRA targets by adapter; they match in both model classes.
TARGETS = {
    "text": r"(?!.*_tower).*layers\.\d+\.(self_attn|mlp)\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
    "towers": tiny_adapters.TARGETS["towers"],
    "both": r".*layers\.\d+\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|ffw_layer_1)",
}


@dataclass(frozen=True)
class Failure:
    """What is wrong with a case.

    Attributes:
        stage: ``"reference"`` (the case is not valid), ``"load"``, ``"placement"``, ``"run"``, ``"outputs"`` or
            ``"placement after"``.
        signature: equal for failures that probably have one cause.
        detail: the whole message, with the innermost upstream frames.
    """

    stage: str
    signature: str
    detail: str


class Bench:
    """A folder with checkpoints and adapters, and the outputs of one device, each computed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Any, Any] = {}
        self._workspace = workspace.Workspace(folder)

    @property
    def main(self) -> Any:
        """Where the model computes: GPU 0, or the CPU where there is none."""
        return self._workspace.main

    def device_map(self, case: Case) -> dict[str, Any]:
        away = "disk" if self.main == "cpu" else case.offloaded_to
        return {name: self.main if place == MAIN else away for name, place in case.placement}

    def checkpoint(self, case: Case) -> Path:
        return self._once(
            ("checkpoint", *case.config_key), lambda: _build_checkpoint(case, self._folder("checkpoint"))
        )

    def adapter(self, case: Case) -> Path:
        return self._once(
            ("adapter", case.adapter, *case.config_key), lambda: self._build_adapter(case, self._folder("adapter"))
        )

    def reference(self, case: Case) -> workspace.Outputs:
        """The outputs of the case's weights, all on one device."""

        def compute() -> workspace.Outputs:
            model = self.base(case, device_map={"": self.main})
            return self.outputs(case, self.adapted(case, model))

        return self._once(("reference", *case.reference_key), compute)

    def base(self, case: Case, device_map: dict[str, Any], **kwargs: Any) -> Any:
        """The base model through ``from_pretrained``."""
        import torch

        return (
            model_class(case)
            .from_pretrained(
                self.checkpoint(case),
                dtype=torch.bfloat16,
                device_map=device_map,
                quantization_config=tiny.quantization_config(case.quantization),
                **kwargs,
            )
            .eval()
        )

    def adapted(self, case: Case, model: Any) -> Any:
        if case.adapter is None:
            return model
        from peft import PeftModel

        return PeftModel.from_pretrained(model, self.adapter(case)).eval()

    def split(self, case: Case, offload_folder: Path) -> Any:
        """The base model, placed as the case's map says, in the way the case says."""
        placement = self.device_map(case)
        if case.load == "from_pretrained":
            return self.base(case, placement, offload_folder=str(offload_folder))
        from accelerate import dispatch_model

        model = self.base(case, {"": self.main})
        skip = {"none": None, "own": model._skip_keys_device_placement}[case.skip_keys]
        return dispatch_model(model, placement, offload_dir=str(offload_folder), skip_keys=skip)

    def outputs(self, case: Case, model: Any) -> workspace.Outputs:
        """Three forwards and a greedy generate, without gradients."""
        import torch

        batch = inputs(case, self.main)
        with torch.no_grad():
            logits = tuple(model(**batch).logits.float().cpu() for _ in range(FORWARDS))
            tokens = model.generate(
                **batch, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
            ).cpu()
        return workspace.Outputs(logits, tokens)

    def _build_adapter(self, case: Case, folder: Path) -> Path:
        import torch
        from peft import LoraConfig, get_peft_model

        model = model_class(case).from_pretrained(self.checkpoint(case), dtype=torch.bfloat16)
        modules = dict(model.named_modules())
        matched = [name for name in modules if re.fullmatch(TARGETS[str(case.adapter)], name)]
        # Clipped linears the way adapters in the wild have them, on the inner layer; that needs no patch.
        names = [f"{name}.linear" if f"{name}.linear" in modules else name for name in matched]
        peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=names))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        peft_model.save_pretrained(folder)
        return folder

    def _folder(self, prefix: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=self.folder))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        import torch

        if key not in self._known:
            with torch.random.fork_rng():  # who asks first must draw the same numbers afterwards as who asks second
                self._known[key] = make()
        return self._known[key]


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """A bench in a temporary folder."""
    with quiet(), tempfile.TemporaryDirectory(prefix="gemma4-search-") as folder:
        yield Bench(Path(folder))
    gc.collect()  # dispatched models hold themselves; after each case it would take a third of the time


def check(case: Case, bench: Bench, *, tamper: Callable[[Any], None] | None = None) -> Failure | None:
    """Run the case; None when everything holds.

    Args:
        case: what to run.
        bench: where checkpoints and references are kept.
        tamper: is given the loaded model before it runs; for tests that plant a defect.
    """
    offload_folder = Path(tempfile.mkdtemp(prefix="offload-", dir=bench.folder))
    stage = "reference"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Gemma4CompatWarning)  # no placement that can run is worth a warning
            warnings.filterwarnings("ignore", "several releases of", Gemma4CompatWarning)  # about the machine
            reference = bench.reference(case)
            stage = "load"
            model = bench.split(case, offload_folder)
            wrong = _misplaced(case, bench, model)
            if wrong:
                return _wrong_placement("placement", wrong)
            stage = "adapter"
            model = bench.adapted(case, model)
            wrong = _misplaced(case, bench, model)
            if wrong:
                return _wrong_placement("placement with adapter", wrong)
            if tamper is not None:
                tamper(model)
            stage = "run"
            found = workspace.difference(reference, bench.outputs(case, model))
            if found != 0.0:
                what = "another token or a NaN" if math.isinf(found) else f"logits differ by {found:.3g}"
                return Failure("outputs", "outputs differ from those of one device", what)
            wrong = _misplaced(case, bench, model)
            return _wrong_placement("placement after", wrong) if wrong else None
    except Exception as error:  # noqa: BLE001  (whatever the libraries raise is what is searched for)
        return raised(stage, error)
    finally:
        shutil.rmtree(offload_folder)


def shrink(
    case: Case, failure: Failure, bench: Bench, *, attempts: int = 150, tamper: Callable[[Any], None] | None = None
) -> Case:
    """The smallest case found, greedily, that fails with the same signature."""
    progress = True
    while progress:
        progress = False
        for simpler in simplifications(case):
            if not is_complete(simpler) or size(simpler) >= size(case):
                continue
            if attempts == 0:
                return case
            attempts -= 1
            found = check(simpler, bench, tamper=tamper)
            if found is not None and found.signature == failure.signature:
                case, progress = simpler, True
                break
    return case


def model_class(case: Case) -> Any:
    import transformers

    return {
        "conditional": transformers.Gemma4ForConditionalGeneration,
        "causal": transformers.Gemma4ForCausalLM,
    }[case.model]


def _config(case: Case) -> Any:
    """The shape of :func:`tiny_configs.config` with the case's choices."""
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    base = tiny_configs.config()
    full = [(index + 1) % case.period == 0 or index + 1 == case.layers for index in range(case.layers)]
    options: dict[str, Any] = {}
    if case.experts:
        # 32: bitsandbytes on the CPU wants out_features a multiple of 32, also of the router.
        options |= {"enable_moe_block": True, "num_experts": 32, "top_k_experts": 2, "moe_intermediate_size": 32}
    if case.keys_are_values:
        options |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    text = gemma4.Gemma4TextConfig(
        vocab_size=tiny_configs.VOCABULARY,
        vocab_size_per_layer_input=tiny_configs.VOCABULARY,
        hidden_size=64,
        hidden_size_per_layer_input=64 if case.per_layer else 0,
        intermediate_size=128,
        num_hidden_layers=case.layers,
        num_kv_shared_layers=case.kv_shared,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        layer_types=["full_attention" if is_full else "sliding_attention" for is_full in full],
        sliding_window=8,
        max_position_embeddings=256,
        final_logit_softcapping=30.0,
        use_double_wide_mlp=case.wide_mlp,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        **options,
    )
    if case.model == "causal":
        return text
    return gemma4.Gemma4Config(
        text_config=text,
        vision_config=base.vision_config if case.vision else None,
        audio_config=base.audio_config if case.audio else None,
        **{
            name: getattr(base, name)
            for name in (
                "image_token_id", "audio_token_id", "video_token_id", "boi_token_id", "eoi_token_id", "boa_token_id",
                "eoa_token_index", "tie_word_embeddings",
            )
        },
    )  # fmt: skip


def _build_checkpoint(case: Case, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    model = model_class(case)(_config(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
            elif not name.endswith("per_dim_scale"):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("input_min", "output_min")):
                buffer.fill_(-1.25)
            elif name.endswith(("input_max", "output_max")):
                buffer.fill_(1.25)
            elif name.endswith("layer_scalar"):
                buffer.fill_(0.75)  # 1.0 is what a lost buffer is initialized to
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def inputs(case: Case, device: Any) -> dict[str, Any]:
    """A prompt of 24 tokens; with an image and a sound for the towers there are, unless it is text only."""
    import torch

    media = case.prompt == "media"
    batch = tiny.inputs(device)
    ids = batch["input_ids"]
    plain = tiny.inputs(device, text_only=True)["input_ids"]
    for token, present, names in (
        (tiny_configs.IMAGE_TOKEN, media and case.vision, ("pixel_values", "image_position_ids")),
        (tiny_configs.AUDIO_TOKEN, media and case.audio, ("input_features", "input_features_mask")),
    ):
        if not present:
            batch["mm_token_type_ids"][ids == token] = 0
            batch["input_ids"] = ids = torch.where(ids == token, plain, ids)
            for name in names:
                del batch[name]
    if case.model == "causal":
        del batch["mm_token_type_ids"]
    return batch


_TIED = ("lm_head.weight", "embed_tokens.weight")


def _misplaced(case: Case, bench: Bench, model: Any) -> list[str]:
    """What is not where the map says (see the rule at the top), in words."""
    import torch

    wrong: list[str] = []
    asked = bench.device_map(case)
    has = getattr(model, "hf_device_map", None)
    if has is None and len(set(asked.values())) == 1 and case.load == "from_pretrained":
        has = asked  # transformers dispatches nothing for a map of one device, and notes none
    if has != asked:
        wrong.append(f"hf_device_map is {has}, asked for {asked}")
    places = dict(case.placement)

    def place(name: str) -> str:
        key = owner(case.placement, name)
        assert key is not None, f"{name} is not covered: the case is not complete"
        return places[key]

    base = model.get_base_model() if case.adapter is not None and hasattr(model, "get_base_model") else model
    main = torch.device("cuda", bench.main) if isinstance(bench.main, int) else torch.device(bench.main)
    parameters = {
        name.replace(".base_layer", ""): parameter for name, parameter in base.named_parameters(remove_duplicate=False)
    }
    tied = {name: place(name) for name in parameters if name.endswith(_TIED)}
    for name, parameter in parameters.items():
        if "lora_" in name or place(name) == MAIN:
            allowed = {main}
        elif name in tied and MAIN in tied.values():
            allowed = {main, torch.device("meta")}
        else:
            allowed = {torch.device("meta")}
        if parameter.device not in allowed:
            expected = "meta" if main not in allowed else "the main device"
            wrong.append(f"parameter {name} is on {parameter.device}, not on {expected}")
    wrong += [
        f"buffer {name} is on {buffer.device}"
        for name, buffer in base.named_buffers()
        # A module that has nothing but buffers which are not saved, as a rotary embedding, needs no entry.
        if buffer.device != main and owner(case.placement, name) is not None
    ]
    return wrong


def _wrong_placement(stage: str, wrong: list[str]) -> Failure:
    return Failure(stage, f"{stage}: {general(wrong[0])}", f"{len(wrong)} misplaced: " + "; ".join(wrong[:8]))


def raised(stage: str, error: Exception) -> Failure:
    frames = [
        f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename
    ]
    message = " ".join(str(error).split())
    # Lines differ between releases, names hardly.
    upstream = [
        frame for frame in frames if frame.startswith(("accelerate/", "transformers/", "peft/", "bitsandbytes/"))
    ]
    where = re.sub(r":\d+ ", ":", upstream[-1]) if upstream else frames[-1]
    signature = f"{stage}: {type(error).__name__}: {general(message)[:160]} [{where}]"
    return Failure(stage, signature, f"{type(error).__name__}: {message[:600]}\n  " + "\n  ".join(frames[-10:]))


def general(message: str) -> str:
    """A message without what differs between cases of one cause: names of modules, numbers, maps."""
    message = re.sub(r"\{.*\}", "{...}", message)
    message = re.sub(r"^\w+ is on the meta", "PARAMETER is on the meta", message)
    message = re.sub(r"(?:base_model\.)?\b(?:model|lm_head)(?:\.\w+)+", "MODULE", message)
    message = re.sub(r"0x[0-9a-f]+|/\S+", "_", message)
    return re.sub(r"\d+", "N", message)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The libraries announce every offload; a search does thousands. Afterwards they speak as they did."""
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    loggers = [logging.getLogger(name) for name in ("accelerate", "bitsandbytes", "gemma4_compat", "transformers")]
    levels = [logger.level for logger in loggers]
    bars = transformers_logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
