"""What a process of trained.py does: load a checkpoint in one software, answer token ids, save the logits.

transformers and mlx-lm generate by their own loops. llama.cpp's C API has none, and of vLLM only the model runs here
(with_vllm.py): there the next token is the likeliest of the logits. Nothing needs a tokenizer.
"""

from __future__ import annotations

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


class Transformers:
    """The class that the checkpoint names, and PEFT."""

    def __init__(self, order: Order) -> None:
        import torch
        import transformers

        from gemma4_compat._reproduction import tiny

        dtype = getattr(torch, order["dtype"])
        (cls,) = _settings(order)["architectures"]
        loaded = tiny.load(Path(order["checkpoint"]), dtype=dtype, cls=cls)
        if order["adapter"]:
            from peft import PeftModel

            loaded = PeftModel.from_pretrained(loaded, order["adapter"]).to(dtype)
        self.model, self.release = loaded.eval(), transformers.__version__

    def greedy(self, prompt: list[int], count: int, ends: list[int]) -> list[int]:
        """See :class:`Reader`."""
        import torch

        ids = torch.tensor([prompt])
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
        with torch.no_grad():
            found: list[int] = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), **options
            ).tolist()[0]
        return found[len(prompt) :]

    def logits(self, tokens: list[int]) -> Any:
        """See :class:`Reader`."""
        import torch

        with torch.no_grad():
            return self.model(input_ids=torch.tensor([tokens])).logits[0].double().numpy()


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

    def greedy(self, prompt: list[int], count: int, ends: list[int]) -> list[int]:
        """See :class:`Reader`."""
        self.llama.forget()
        answer = [int(self.llama.decode(prompt, 0).argmax())]
        while len(answer) < count and answer[-1] not in ends:
            answer.append(int(self.llama.decode(answer[-1:], len(prompt) + len(answer) - 1).argmax()))
        return answer

    def logits(self, tokens: list[int]) -> Any:
        """See :class:`Reader`."""
        self.llama.forget()
        return self.llama.decode(tokens, 0, every=True)


READERS: dict[str, Callable[[Order], Reader]] = {
    "transformers": Transformers,
    "mlx-lm": Mlx,
    "llama.cpp": Llama,
    "vLLM": Vllm,
}


def _settings(order: Order) -> Data:
    found: Data = json.loads((Path(order["checkpoint"]) / "config.json").read_text(encoding="utf-8"))
    return found


def answers(order: Order) -> Data:
    """Greedy answers to the prompts. In the file ``save`` are the logits from which each token of ``along`` (or of the
    answers, where that is None) follows, an array of shape (tokens, vocabulary) for each prompt.
    """
    import numpy

    reader = READERS[order["software"]](order)
    said = [reader.greedy(prompt, order["count"], order["ends"]) for prompt in order["prompts"]]
    saved = {}
    for number, (prompt, answer) in enumerate(zip(order["prompts"], order["along"] or said, strict=True)):
        saved[str(number)] = reader.logits([*prompt, *answer])[len(prompt) - 1 : -1]
    numpy.savez(order["save"], **saved)
    return {"answers": said, "release": reader.release}


def save(order: Order) -> Data:
    """What ``save_pretrained`` of a class writes of a checkpoint, in bf16."""
    from gemma4_compat._reproduction import tiny

    tiny.load(Path(order["checkpoint"]), cls=order["cls"]).save_pretrained(order["out"])
    return {}


ACTIONS: dict[str, Callable[[Order], Data]] = {"answers": answers, "save": save}

if __name__ == "__main__":
    sys.exit(common.serve(ACTIONS, stack=False))
