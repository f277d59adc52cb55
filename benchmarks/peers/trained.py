"""Is the text that mlx-lm, llama.cpp and vLLM generate from what merge, export and repair wrote that of transformers?

python benchmarks/peers/trained.py [--mlx SITE] [--llama-cpp TREE] [--vllm SITE] \\
    --out benchmarks/results/DATE-cpu/trained.json
python benchmarks/peers/trained.py --media E2B [--mlx SITE] [--llama-cpp TREE] \\
    --out benchmarks/results/DATE-cpu/trained_media-E2B.json

The model is the trained tiny Gemma 4 of the repository (docs/TRAINED_MODEL.md), whose answers mean something. Each
software gets the token ids of the same questions, of one turn and of several, with answers longer than a sliding
window, and generates greedily. transformers runs without the shim. What is compared:

texts    token by token. Of one that differs: the first other token, and by how much transformers and the software
         prefer their own token there (`gap` and `its_gap`, differences of logits; 0 is a tie)
logits   those from which each token of transformers' answers follows: the largest difference (`apart`). `rounding` is
         what a dtype alone does in transformers: bfloat16 against float32, float32 against float64

It is a problem (exit code 1) if a text differs and the gap is larger than BOUNDS allow, or if the logits are further
apart: rounding cannot do that.

`--mlx SITE` is a folder with mlx-lm: `pip install --no-deps --target SITE mlx mlx-cpu mlx-lm`. `--llama-cpp TREE` is
llama.cpp's source tree, built with shared libraries into TREE/build/bin (the target `llama` is enough); the Python
package `llama_cpp` (llama-cpp-python) of that time declares its C API. Its converter makes GGUF files in F32 and BF16,
with made-up tokens, for it takes no tokens of bytes. Keys and values are in float32, except with its defaults.
With `--media KIND` the questions are about pictures and sounds, of the E2B or a twin of it. mlx-vlm (in the same SITE,
with what it imports) and llama.cpp's library `mtmd` (the target of that name) see and hear; mlx-lm does not, and
vLLM's towers do not run here.

`--vllm SITE` is folders with vLLM's package, unpacked, and what it imports; with_vllm.py says what of it runs here.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import ROOT, Data, Worker
from benchmarks.peers import llama as peers_llama
from benchmarks.peers import mtmd, readers
from benchmarks.peers.models import Llama, write_processor, write_tokenizer
from benchmarks.small_card import device
from gemma4_compat._lab.trained import PLACE, TWINS, Trained

TRANSFORMERS, MLX, MLX_VLM, LLAMA, VLLM = readers.READERS
#: What `export` calls them.
TARGETS = {MLX: "mlx", LLAMA: "gguf", VLLM: "vllm"}
#: Those with eyes and ears, and those without.
MEDIA, TEXT = (TRANSFORMERS, MLX_VLM, LLAMA), (TRANSFORMERS, MLX, LLAMA, VLLM)
KINDS = {"E2B": PLACE, **TWINS}
#: Of what is written, that which `--media` asks about by default.
SEEN = ("as-it-is", "merged", "merged-dequantized", "exported")
EXPORTED = "exported"  # for the software that reads it
OWN = "BF16, its defaults"
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16"}
#: Name in the result -> the dtype that transformers has there.
WAYS = {
    TRANSFORMERS: _DTYPES,
    MLX: _DTYPES,
    MLX_VLM: _DTYPES,
    LLAMA: {"F32": "float32", "BF16": "bfloat16", OWN: "bfloat16"},
    VLLM: _DTYPES,
}
#: Tokens after which an answer has ended: <eos>, <turn|>.
ENDS = [1, 5]
#: Tokens of an answer, at most: more than any story has.
COUNT = 176
#: What `repair` adds to what was saved without them.
LOST = "transformers-shared-kv-weights,transformers-config-names"
#: The dtype whose difference from a dtype says what rounding does.
FINER = {"float32": "float64", "bfloat16": "float32"}
#: How far logits may be apart, in what rounding to bfloat16 does in transformers. In bfloat16 each rounds in its own
#: way. In float32, a table in float16 (llama.cpp's GELU) has three bits more than bfloat16, a factor of eight.
BOUNDS = {"float32": 1 / 8, "bfloat16": 3.0}
#: With a picture or a sound: the towers have such a table, too, and layers enlarge what it changes.
BOUNDS_OF_MEDIA = BOUNDS | {"float32": 1 / 2}


@dataclass(frozen=True)
class Case:
    """What was written, and what reads it.

    Attributes:
        title: in the table.
        checkpoint: its folder.
        adapter: what `export` makes of the adapter beside it: :data:`EXPORTED`, or "peft".
        by_peft: the folder of the adapter that transformers loads beside it, through PEFT.
        refused: it is damaged, so a software may refuse it.
    """

    title: str
    checkpoint: str
    adapter: str | None = None
    by_peft: str = "adapter"
    refused: bool = False


CASES = {
    "as-it-is": Case("the checkpoint as it is", "model"),
    "released": Case("with unused keys and values, as released ones have them", "released"),
    "merged": Case("`merge` of the pirate adapter", "merged"),
    "merged-dequantized": Case("`merge --start dequantized` of it", "merged-dequantized"),
    "exported": Case("`export` of it, on the checkpoint", "model", EXPORTED),
    "exported-peft": Case("`export --for peft` of it, read or converted by the software", "model", "peft"),
    "saved": Case("`save_pretrained` without this package", "saved", refused=True),
    "repaired": Case("the same, with `repair`", "repaired"),
    "repaired-text": Case("saved as `Gemma4ForCausalLM`, with `repair`", "repaired-text"),
    "repaired-merged": Case("the same, then `merge` of the pirate adapter", "merged-repaired-text"),
    "repaired-exported": Case(
        "the same, with `export` of it", "repaired-text", EXPORTED, by_peft="for-peft-repaired-text"
    ),
}


def questions(count: int | None = None) -> list[list[str]]:
    """What the user and the model say in turns, the user last; facts, docstrings, sums, reading, stories."""
    from tools.trained_model import texts

    draw = random.Random(44)
    facts = list(texts.FACTS)
    asked = [[question] for question in [*facts[:10], *list(texts.docstrings())[:4]]]
    asked += [[one(draw).question] for one in (texts.addition, texts.addition, texts.reading, texts.reading)]
    asked += [[texts.story(draw).question] for _ in range(3)]
    first, second, third = facts[10:13]
    asked += [[first, texts.FACTS[first], second], [first, texts.FACTS[first], second, texts.FACTS[second], third]]
    return asked if count is None else asked[:count]


def media(trained: Trained) -> list[dict[str, str]]:
    """Every other picture that comes with the model, and every sound, if it hears."""
    shared = Trained.find().folder
    names = {kind: sorted(file.stem for file in (shared / f"{kind}s").iterdir()) for kind in ("picture", "sound")}
    settings = json.loads((trained.checkpoint / "config.json").read_text(encoding="utf-8"))
    hears = settings.get("audio_config") is not None
    found = [{"picture": name} for name in names["picture"][::2]]
    return found + [{"sound": name} for name in names["sound"] if hears]


#: What is asked of them.
_ABOUT = {"picture": "What do you see?", "sound": "What do you hear?"}


# What is written


class Written:
    """The folders of :data:`CASES`, each made when it is asked for; ``start`` makes a process of readers.py."""

    def __init__(self, work: Path, start: Callable[..., Worker], trained: Trained | None = None) -> None:
        self.work, self.start, self.trained = work, start, trained or Trained.find()

    def __call__(self, name: str) -> Path:
        """The folder of that name."""
        folder = self.work / name
        if not folder.exists():
            kind, _, rest = name.partition("-")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                getattr(self, f"_{kind}")(folder, rest)
        return folder

    def _model(self, folder: Path, _: str) -> None:
        shutil.copytree(self.trained.checkpoint, folder)
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        if config["model_type"] == "gemma4_unified":  # llama.cpp wants the first, mlx-vlm has 48 pixels for the second
            config["text_config"].setdefault("moe_intermediate_size", None)
            vision = config["vision_config"]
            vision.setdefault("model_patch_size", vision["patch_size"] * vision["pooling_kernel_size"])
            file.write_text(json.dumps(config, indent=1), encoding="utf-8")

    def _adapter(self, folder: Path, _: str) -> None:
        shutil.copytree(self.trained.adapter, folder)

    def _released(self, folder: Path, _: str) -> None:
        from gemma4_compat._lab import tiny_models

        tiny_models.build_released(self("model"), folder)

    def _merged(self, folder: Path, base: str) -> None:
        more = {"start": base} if base == "dequantized" else {}
        given = self("model" if more or not base else base)
        gemma4_compat.merge_adapter(given, self("adapter"), folder, progress=False, **more)

    def _saved(self, folder: Path, text: str) -> None:
        cls = "Gemma4ForCausalLM" if text else "Gemma4ForConditionalGeneration"
        worker = self.start(True, GEMMA4_COMPAT_DISABLE=LOST if text else "all")
        order = {"do": "save", "cls": cls, "checkpoint": str(self("released")), "folder": str(self.work)}
        if error := worker(order | {"out": str(folder)})["error"]:
            raise SystemExit(f"{folder.name}: {error}")
        worker.close()

    def _repaired(self, folder: Path, text: str) -> None:
        damaged = self("saved-text" if text else "saved")
        gemma4_compat.repair_checkpoint(damaged, self("released"), folder, progress=False)

    def _for(self, folder: Path, rest: str) -> None:
        target, _, base = rest.partition("-")
        gemma4_compat.export_adapter(self("adapter"), folder, target, base=self(base))


# What reads it


@dataclass
class Software:
    """One of the :data:`readers.READERS`.

    Attributes:
        name: its key there.
        ask: its process.
        written: what it reads.
        convert: llama.cpp's converters.
        media: what each prompt shows, if they show something.
    """

    name: str
    ask: Worker
    written: Written
    convert: Llama | None = None
    media: list[dict[str, str]] | None = None

    def files(self, case: Case, way: str) -> tuple[Path, Path | None] | None:
        """The checkpoint and the adapter as it takes them; None: it does not read such a case.

        Raises:
            RuntimeError: the converter refused it.
        """
        checkpoint, adapter = self.written(case.checkpoint), case.adapter
        if self.name == TRANSFORMERS:
            return checkpoint, self.written(case.by_peft) if adapter else None
        if (adapter == "peft" and self.name == MLX) or (adapter and self.name == MLX_VLM):
            return None  # mlx-vlm 0.7.10 loads none onto a model with an audio tower
        if self.name == MLX_VLM and way != "float32" and self.written.trained.folder.name.endswith("a4b"):
            return None  # on a CPU, MLX multiplies experts in float32 alone
        target = TARGETS[self.name] if adapter == EXPORTED else adapter
        made = self.written(f"for-{target}-{case.checkpoint}") if adapter else None
        if self.convert is None:
            return checkpoint, made
        folder = self._beside(checkpoint)
        file = self._gguf(folder, "f32" if way == "F32" else "bf16")
        if adapter == "peft" and made:
            shutil.copytree(made, folder / "adapter", dirs_exist_ok=True)
            return file, self._gguf(folder, "lora")
        return file, made and made / "adapter.gguf"

    def _beside(self, checkpoint: Path) -> Path:
        """A folder with a copy of the checkpoint, with tokens that the converter takes."""
        folder = self.written.work / "gguf" / checkpoint.name
        if not folder.exists():
            shutil.copytree(checkpoint, folder / "checkpoint")
            write_tokenizer(folder / "checkpoint")
            write_processor(folder / "checkpoint")
        return folder

    def _gguf(self, folder: Path, kind: str) -> Path:
        assert self.convert is not None
        if not (folder / f"{kind}.gguf").exists():
            self.convert.convert(kind, folder, 200)
        return folder / f"{kind}.gguf"

    def answers(self, case: Case, way: str, prompts: list[list[int]], along: list[list[int]] | None, to: Path) -> Data:
        """Its ``answers`` and its ``release``, or an ``error``; neither, if it does not read such a case. The logits
        go to a file.
        """
        try:
            found = self.files(case, way)
        except RuntimeError as error:
            return {"error": str(error)}
        if found is None:
            return {"error": None}
        order = {"do": "answers", "software": self.name, "folder": str(self.written.work)}
        order |= {"checkpoint": str(found[0]), "adapter": found[1] and str(found[1]), "save": str(to)}
        order |= {"dtype": WAYS[self.name].get(way, way), "exact": way != OWN}
        order |= {"trained": str(self.written.trained.folder), "media": self.media}
        if self.media and self.convert is not None:
            config = self.written(case.checkpoint) / "config.json"
            towers = self._gguf(found[0].parent, "mmproj-f32" if way == "F32" else "mmproj-bf16")
            order |= {"towers": str(towers), "settings": json.loads(config.read_text(encoding="utf-8"))}
        return self.ask(order | {"prompts": prompts, "along": along, "count": COUNT, "ends": ENDS}, timeout=900)


# What is compared


def compared(expected: list[list[int]], found: list[list[int]], reference: Path, logits: Path) -> Data:
    """Texts and logits of a software beside those of transformers."""
    import numpy

    one, other = numpy.load(reference), numpy.load(logits)
    differ = []
    for number, (wanted, answer) in enumerate(zip(expected, found, strict=True)):
        if wanted == answer:
            continue
        at = next((at for at, pair in enumerate(zip(wanted, answer, strict=False)) if pair[0] != pair[1]), None)
        if at is None:  # one of them ended at the limit
            raise ValueError(f"the answers {wanted} and {answer} differ in length alone")
        gaps = [float(rows[str(number)][at][wanted[at]] - rows[str(number)][at][answer[at]]) for rows in (one, other)]
        differ.append({"question": number, "token": at, "gap": gaps[0], "its_gap": -gaps[1]})
    apart = max(float(numpy.abs(one[name] - other[name]).max()) for name in one.files)
    return {"equal": len(expected) - len(differ), "of": len(expected), "differ": differ, "apart": apart}


def problems(case: Case, name: str, found: Data, bound: float) -> Iterator[str]:
    """What is not as it should be in what :func:`measured` says of a software."""
    if found.get("error"):
        if not case.refused:
            yield f"{name}: {found['error']}"
        return
    for one in found["differ"]:
        if one["gap"] > bound:
            yield f"{name}: another answer to question {one['question']}, gap {one['gap']:.3g} (bound {bound:.3g})"
    if found["apart"] > bound:
        yield f"{name}: logits are {found['apart']:.3g} apart (bound {bound:.3g})"


def measured(key: str, softwares: dict[str, Software], prompts: list[list[int]], result: Data) -> Data:
    """A case: answers and logits of transformers in each dtype, and of each software beside them."""
    case, work = CASES[key], softwares[TRANSFORMERS].written.work
    reference: dict[str, list[list[int]]] = {}
    found: Data = {"title": case.title, TRANSFORMERS: {}}
    for dtype in ("float32", "bfloat16"):
        answer = softwares[TRANSFORMERS].answers(case, dtype, prompts, None, work / f"{dtype}.npz")
        if answer["error"]:
            result["problems"].append(f"{key}: transformers, {dtype}: {answer['error']}")
            return found | {"error": answer["error"]}
        result["releases"][TRANSFORMERS] = answer["release"]
        reference[dtype] = answer["answers"]
        finer = softwares[TRANSFORMERS].answers(case, FINER[dtype], prompts, reference[dtype], work / "finer.npz")
        if finer["error"]:
            raise SystemExit(f"{key}: transformers, {FINER[dtype]}: {finer['error']}")
        rounding = compared(reference[dtype], reference[dtype], work / f"{dtype}.npz", work / "finer.npz")["apart"]
        said = texts(reference[dtype])
        pirate = sum(text.startswith("Arr") for text in said)
        found[TRANSFORMERS][dtype] = {"texts": said, "pirate": pirate, "rounding": rounding}
    scale = found[TRANSFORMERS]["bfloat16"]["rounding"]
    for name, software in softwares.items():
        if name == TRANSFORMERS:
            continue
        found[name] = {}
        for way, dtype in WAYS[name].items():
            answer = software.answers(case, way, prompts, reference[dtype], work / "its.npz")
            if answer["error"]:
                one: Data = {"error": answer["error"]}
            elif "answers" not in answer:
                continue
            else:
                result["releases"][name] = answer["release"]
                one = compared(reference[dtype], answer["answers"], work / f"{dtype}.npz", work / "its.npz")
                for differs in one["differ"]:
                    differs["text"] = texts([answer["answers"][differs["question"]]])[0]
            said = problems(case, f"{name}, {way}", one, result["bounds"][dtype] * scale)
            result["problems"] += [f"{key}: {problem}" for problem in said]
            found[name][way] = one
    return found


def texts(answers: list[list[int]]) -> list[str]:
    """What token ids say, without special tokens."""
    from tools.trained_model import model

    return [
        bytes(token - model.BYTES for token in answer if token >= model.BYTES).decode(errors="replace")
        for answer in answers
    ]


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, ["trained"], minutes=30.0)
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's source tree, built into build/bin")
    parser.add_argument("--mlx", help="the folder with mlx-lm")
    parser.add_argument("--vllm", help="the folders with vLLM and what it imports, as in PYTHONPATH")
    parser.add_argument("--questions", type=int, help="ask the first so many alone")
    parser.add_argument("--media", choices=KINDS, help="ask this kind about pictures and sounds")
    parser.add_argument("--cases", help=f"with commas; by default all, with --media {', '.join(SEEN)}")
    arguments = parser.parse_args(argv)
    arguments.cases = arguments.cases or ",".join(SEEN if arguments.media else CASES)
    common.chosen(parser, arguments, "cases", CASES)
    places = {"--llama-cpp": ("TREE", arguments.llama_cpp), "--mlx": ("SITE", arguments.mlx)}
    places["--vllm"] = ("SITE", arguments.vllm)
    given = [part for option, (shown, path) in places.items() if path for part in (option, shown)]
    given += ["--media", arguments.media] if arguments.media else []
    result = common.header(Path(__file__), sys.modules[__name__], "trained", given, arguments.note)
    trained = Trained.find(ROOT / KINDS[arguments.media]) if arguments.media else Trained.find()
    shown = media(trained)[: arguments.questions] if arguments.media else None
    asked = [[_ABOUT[kind]] for one in shown for kind in one] if shown else questions(arguments.questions)
    prompts = [
        trained.prompt(*said, **one)["input_ids"][0].tolist()
        for said, one in zip(asked, shown or [{}] * len(asked), strict=True)
    ]
    result |= {
        "machine": device.machine(),
        "bounds": BOUNDS_OF_MEDIA if shown else BOUNDS,
        "releases": {},
        "questions": asked,
    }
    result |= {"tokens": [len(prompt) for prompt in prompts], "media": shown, "cases": {}}
    with (
        tempfile.TemporaryDirectory(dir=arguments.work) as folder,
        tempfile.TemporaryDirectory() as logs,
        common.workers(Path(readers.__file__), Path(logs)) as start,
    ):
        softwares = started(start, arguments, Written(Path(folder), start, trained), result)
        for software in softwares.values():
            software.media = shown
        for key in arguments.cases:
            found = result["cases"][key] = measured(key, softwares, prompts, result)
            common.write(result, arguments.out)
            print(key, {name: summary(one) for name, one in found.items() if name in softwares}, flush=True)
    common.write(result, arguments.out)
    return common.ended(result)


def summary(ways: Data) -> Data:
    """A software's ways in short."""
    return {
        way: one.get("error")
        or (f"{one['equal']} of {one['of']}, {one['apart']:.2g}" if "equal" in one else one["pirate"])
        for way, one in ways.items()
    }


def started(start: Callable[..., Worker], arguments: Any, written: Written, result: Data) -> dict[str, Software]:
    """The processes of each software that is there; which are not goes into ``result``."""
    # The shim is off, except with --media: transformers alone masks the 12B's pictures differently (F68).
    found = {TRANSFORMERS: Software(TRANSFORMERS, start(bool(arguments.media)), written)}
    places = dict.fromkeys((MLX, MLX_VLM), arguments.mlx) | {LLAMA: arguments.llama_cpp, VLLM: arguments.vllm}
    for name in (MEDIA if arguments.media else TEXT)[1:]:
        place = places[name]
        if not place:
            result["not_run"].append(name)
        elif name == LLAMA:
            tree = Llama(place)
            more = {peers_llama.LIBRARIES: str(tree.programs), mtmd.MTMD: str(tree.programs), "GGML_NO_BACKTRACE": "1"}
            found[name] = Software(name, start(False, **more), written, tree)
        else:
            path = os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")]))
            found[name] = Software(name, start(False, PYTHONPATH=path), written)
    return found


if __name__ == "__main__":
    sys.exit(main())
