"""What a process of trained.py does: load a checkpoint in one software, answer token ids, save the logits.

transformers, mlx-lm and mlx-vlm generate by their own loops. llama.cpp's C API has none, and of vLLM only the model
runs here (with_vllm.py): there the next token is the likeliest of the logits. Nothing needs a tokenizer. A prompt with
a picture or a sound has its soft tokens; mlx-vlm gets what transformers' processors make of it, llama.cpp the pixels
and samples.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.peers.with_vllm import Vllm
from gemma4_compat._lab.trained import Trained, heard, seen

#: Tokens of a prompt with its answer, at most.
CONTEXT = 512


class Reader(Protocol):
    """A loaded model."""

    #: Of the software.
    release: str

    def greedy(self, prompt: list[int], count: int, ends: list[int]) -> list[int]:
        """Tokens of the answer, at most ``count``; the last one may be one of ``ends``."""
        ...

    def logits(self, tokens: list[int]) -> Any:
        """After each of the tokens: float32 of shape (tokens, vocabulary); those of transformers are float64."""
        ...


class Sees(Reader, Protocol):
    """A reader that also takes pictures and sounds."""

    def show(self, media: dict[str, str]) -> None:
        """What soft tokens stand for from now on: a ``picture`` or a ``sound`` of the trained model, by name."""
        ...


class Transformers:
    """The class that the checkpoint names, and PEFT."""

    def __init__(self, order: Order) -> None:
        import torch
        import transformers

        from gemma4_compat._lab import tiny

        dtype = getattr(torch, order["dtype"])
        (cls,) = _settings(order)["architectures"]
        # The products of experts in groups have no float64.
        more = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        loaded = tiny.load(Path(order["checkpoint"]), dtype=dtype, cls=cls, **more)
        if order["adapter"]:
            from peft import PeftModel

            loaded = PeftModel.from_pretrained(loaded, order["adapter"]).to(dtype)
        for name, tower in loaded.named_modules():
            if dtype == torch.float64 and name.endswith(".audio_tower"):  # its attention has no float64
                tower.float().register_forward_hook(_as_double)
        self.model, self.release = loaded.eval(), transformers.__version__
        self.soft, self.shown = Soft(order), {}

    def show(self, media: dict[str, str]) -> None:
        """See :class:`Sees`."""
        self.shown = self.soft.tensors(media)

    def greedy(self, prompt: list[int], count: int, ends: list[int]) -> list[int]:
        """See :class:`Reader`."""
        import torch

        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
        with torch.no_grad():
            found: list[int] = self.model.generate(**self._batch(prompt), **options).tolist()[0]
        return found[len(prompt) :]

    def logits(self, tokens: list[int]) -> Any:
        """See :class:`Reader`."""
        import torch

        with torch.no_grad():
            return self.model(**self._batch(tokens)).logits[0].double().numpy()

    def _batch(self, tokens: list[int]) -> dict[str, Any]:
        import torch

        ids = torch.tensor([tokens])
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self.shown}
        return found | ({"mm_token_type_ids": torch.tensor([self.soft.kinds(tokens)])} if self.shown else {})


def _as_double(_: Any, __: Any, output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state.double()
    return output


class Soft:
    """The soft tokens of a checkpoint, and what they stand for.

    Attributes:
        tokens: their ids, and the number of each kind in ``mm_token_type_ids``.
        both_ways: those of a picture see one another.
    """

    def __init__(self, order: Order) -> None:
        settings = order["settings"] if "settings" in order else _settings(order)
        numbers = {"image_token_id": 1, "audio_token_id": 3}
        self.tokens = {settings[name]: number for name, number in numbers.items() if settings.get(name) is not None}
        self.unified = settings["architectures"][0].startswith("Gemma4Unified")
        self.both_ways = settings.get("text_config", settings).get("use_bidirectional_attention") == "vision"
        self.trained = Trained(Path(order["trained"]))

    def kinds(self, tokens: list[int]) -> list[int]:
        """``mm_token_type_ids``."""
        return [self.tokens.get(token, 0) for token in tokens]

    def tensors(self, media: dict[str, str]) -> dict[str, Any]:
        """What transformers' processors make of it."""
        if "picture" in media:
            return seen([self.trained.picture(media["picture"])], unified=self.unified)
        return heard([self.trained.sound(media["sound"])], unified=self.unified)

    def runs(self, tokens: list[int]) -> list[tuple[int, list[int]]]:
        """The tokens in parts: a kind (0: text), and those that follow each other with it."""
        return [
            (kind, [token for _, token in part])
            for kind, part in itertools.groupby(zip(self.kinds(tokens), tokens, strict=True), lambda pair: pair[0])
        ]


class Mlx:
    """mlx-lm, with its strict load."""

    def __init__(self, order: Order) -> None:
        import mlx.core as mx
        from mlx_lm import utils
        from mlx_lm.tuner.utils import load_adapters

        mx.set_default_device(mx.cpu)
        settings = _settings(order)
        # Read beside the text model's; released ones have the default there.
        size = {"vocab_size": settings.get("text_config", settings)["vocab_size"]}
        self.model, _ = utils.load_model(Path(order["checkpoint"]), strict=True, model_config=size)
        if order["adapter"]:
            self.model = load_adapters(self.model, order["adapter"])
        self.model.set_dtype(getattr(mx, order["dtype"]))
        self.model.eval()
        self.release = metadata.version("mlx-lm")

    def greedy(self, prompt: list[int], count: int, ends: list[int]) -> list[int]:
        """See :class:`Reader`."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        answer: list[int] = []
        for token, _ in generate_step(mx.array(prompt), self.model, max_tokens=count):
            answer.append(int(token))
            if token in ends:
                break
        return answer

    def logits(self, tokens: list[int]) -> Any:
        """See :class:`Reader`."""
        import mlx.core as mx
        import numpy
        from mlx_lm.models.cache import make_prompt_cache

        found = self.model(mx.array([tokens]), cache=make_prompt_cache(self.model))
        return numpy.array(found[0].astype(mx.float32))


class MlxVlm:
    """mlx-vlm, with its strict load."""

    def __init__(self, order: Order) -> None:
        import mlx.core as mx
        import mlx_vlm
        from mlx_vlm import utils

        mx.set_default_device(mx.cpu)
        self.model = utils.load_model(Path(order["checkpoint"]))
        self.model.set_dtype(getattr(mx, order["dtype"]))
        self.model.eval()
        self.soft, self.release = Soft(order), mlx_vlm.__version__
        self.shown: dict[str, Any] = {}

    def show(self, media: dict[str, str]) -> None:
        """See :class:`Sees`."""
        import mlx.core as mx

        self.shown = {name: mx.array(tensor.numpy()) for name, tensor in self.soft.tensors(media).items()}

    def greedy(self, prompt: list[int], count: int, ends: list[int]) -> list[int]:
        """See :class:`Reader`."""
        import mlx.core as mx
        from mlx_vlm.generate import generate_step

        shown = {**self.shown, "mm_token_type_ids": mx.array([self.soft.kinds(prompt)])}
        pixels, answer = shown.pop("pixel_values", None), []
        for token, _ in generate_step(mx.array([prompt]), self.model, pixels, None, max_tokens=count, **shown):
            answer.append(int(token))
            if token in ends:
                break
        return answer

    def logits(self, tokens: list[int]) -> Any:
        """See :class:`Reader`."""
        import mlx.core as mx
        import numpy

        # As its loop does it. A call of the 12B's model drops the kinds, and no picture's tokens see one another.
        kinds = mx.array([self.soft.kinds(tokens)])
        made = self.model.get_input_embeddings(mx.array([tokens]), **self.shown, mm_token_type_ids=kinds)
        given = {"inputs_embeds": made.inputs_embeds, "per_layer_inputs": made.per_layer_inputs}
        found = self.model.language_model(None, **given, mm_token_type_ids=kinds).logits
        return numpy.array(found[0].astype(mx.float32))


class Llama:
    """``checkpoint`` is a GGUF file here, ``adapter`` another. Its Python package is that of its time."""

    def __init__(self, order: Order) -> None:
        import llama_cpp

        from benchmarks.peers import llama

        self.llama, self.release = llama, f"in llama-cpp-python {llama_cpp.__version__}"
        placed = {"gpu": False, "layers": 0, "table": "host", "context": CONTEXT, "threads": 1}
        llama.load({"file": order["checkpoint"], "exact": order["exact"], **placed})
        if order["adapter"]:
            llama.adapt({"adapter": order["adapter"]})
        self.soft: Soft | None = None
        if order.get("towers"):
            from benchmarks.peers import mtmd

            self.soft, self.towers = Soft(order), mtmd.Towers(Path(order["towers"]))

    def show(self, media: dict[str, str]) -> None:
        """See :class:`Sees`."""
        assert self.soft is not None
        given = {kind: getattr(self.soft.trained, kind)(name) for kind, name in media.items()}
        self.shown = self.towers.embeddings(**given)

    def greedy(self, prompt: list[int], count: int, ends: list[int]) -> list[int]:
        """See :class:`Reader`."""
        self.llama.forget()
        first = self.llama.decode(prompt, 0) if self.soft is None else self.logits(prompt)[-1]
        answer = [int(first.argmax())]
        while len(answer) < count and answer[-1] not in ends:
            answer.append(int(self.llama.decode(answer[-1:], len(prompt) + len(answer) - 1).argmax()))
        return answer

    def logits(self, tokens: list[int]) -> Any:
        """See :class:`Reader`."""
        import numpy

        self.llama.forget()
        if self.soft is None:
            return self.llama.decode(tokens, 0, every=True)
        found, first = [], 0
        for kind, part in self.soft.runs(tokens):
            if kind:
                both_ways = kind == 1 and self.soft.both_ways
                if len(part) != len(self.shown):
                    raise RuntimeError(f"llama.cpp makes {len(self.shown)} tokens, transformers {len(part)}")
                found.append(self.llama.embed(self.shown, first, both_ways=both_ways))
            else:
                found.append(self.llama.decode(part, first, every=True))
            first += len(part)
        return numpy.concatenate(found)


READERS: dict[str, Callable[[Order], Reader]] = {
    "transformers": Transformers,
    "mlx-lm": Mlx,
    "mlx-vlm": MlxVlm,
    "llama.cpp": Llama,
    "vLLM": Vllm,
}


def _settings(order: Order) -> Data:
    found: Data = json.loads((Path(order["checkpoint"]) / "config.json").read_text(encoding="utf-8"))
    return found


def answers(order: Order) -> Data:
    """Greedy answers to the prompts. In the file ``save`` are the logits from which each token of ``along`` (or of the
    answers, where that is None) follows, an array of shape (tokens, vocabulary) for each prompt. ``media``: what each
    prompt shows, if they show something.
    """
    import numpy

    reader: Any = READERS[order["software"]](order)
    said, saved = [], {}
    for number, prompt in enumerate(order["prompts"]):
        if order.get("media"):
            reader.show(order["media"][number])
        said.append(reader.greedy(prompt, order["count"], order["ends"]))
        answer = order["along"][number] if order["along"] else said[-1]
        saved[str(number)] = reader.logits([*prompt, *answer])[len(prompt) - 1 : -1]
    numpy.savez(order["save"], **saved)
    return {"answers": said, "release": reader.release}


def save(order: Order) -> Data:
    """What ``save_pretrained`` of a class writes of a checkpoint, in bf16."""
    from gemma4_compat._lab import tiny

    tiny.load(Path(order["checkpoint"]), cls=order["cls"]).save_pretrained(order["out"])
    return {}


ACTIONS: dict[str, Callable[[Order], Data]] = {"answers": answers, "save": save}

if __name__ == "__main__":
    sys.exit(common.serve(ACTIONS, stack=False))
