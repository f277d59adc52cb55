"""What a server gives 1, 4 and 16 clients: tokens a second in all, the time to the first token, memory.

python benchmarks/serving/serving.py                                      the trained tiny model, on any machine
python benchmarks/serving/serving.py --shape E2B --out FILE.json          random weights in the real shape, 4 bits
    [--llama-cpp TREE]
python benchmarks/serving/serving.py --address http://127.0.0.1:8080/v1   another server that runs, such as llama.cpp's

`gemma4-compat serve` is started as a process. Each client streams requests one after the other, with other questions
and lengths than its neighbours; a client's time to the first token includes the wait for its turn. Our servers, one
for each number after `--parallel`, start at the same time, are warm then, and get loads in turns. Before them, one
`generate` of the same model in a process of its own, without a server: milliseconds a token. At the end, memory of
each of our servers' processes, and of the GPU in all, after a tenth of `--requests`, and after all of them.

`--starts` measures the starts of a server in place of loads: the first without kernels on disk, then one that finds
them, then one that is asked as soon as it answers, before it is warm. For each, seconds until it answers and until it
is warm, and those of the first texts of `--answer` tokens that one client gets.

`--llama-cpp TREE` is llama.cpp as depth.py takes it, with `llama-server`: Q4_0 of other random weights, flash
attention, as many slots as our servers' answers, and the same numbers of tokens. Each of its servers takes turns with
ours, once choosing tokens as it does by default, and once the likeliest, on the GPU. One that fails is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks import common
from benchmarks.decoding import models
from benchmarks.peers import heads, llama
from benchmarks.serving import llama_server
from gemma4_compat._lab.trained import Trained

CLIENTS = (1, 4, 16)
_SHORT = 16  # tokens of an answer, at most, where only memory is looked at
QUESTIONS = ("How many legs has a fox?", "Tell of a frog and a mole.", "What colour is snow?", "Why is the sky blue?")
TEMPLATE = "{% for turn in messages %}<|turn>{{ turn['role'] }} {{ turn['content'] }}<turn|>{% endfor %}<|turn>model "


def write_tokenizer(checkpoint: Path) -> None:
    """A word for each token of a model with random weights."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import AutoConfig, PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    count = AutoConfig.from_pretrained(checkpoint).get_text_config().vocab_size
    words = [*special, *(f"w{number}" for number in range(len(special), count))]
    tokens = Tokenizer(kinds.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokens, chat_template=TEMPLATE, **names)
    made.add_special_tokens({"additional_special_tokens": special[4:]})
    made.save_pretrained(checkpoint)


class Serving:
    """A server in a process, which loads and warms up beside the caller.

    Args:
        words: its command.
        lines: what it writes when it answers, and when it is warm.
        more: of an environment.
    """

    def __init__(self, words: list[str], lines: dict[str, str], **more: str) -> None:
        self.seconds: dict[str, float] = {}  # until it answers, and until it is warm
        self._said: list[str] = []
        self._lines = lines
        self._begun, self._warm = time.perf_counter(), threading.Event()
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ, HF_HUB_OFFLINE="1", **more),
        )
        threading.Thread(target=self._listen, daemon=True).start()

    @classmethod
    def ours(cls, checkpoint: Path, adapter: Path, given: list[str], **more: str) -> Serving:
        """Of the shim; ``more`` of an environment."""
        words = [sys.executable, "-m", "gemma4_compat", "serve", str(checkpoint), "--adapter", f"adapted={adapter}"]
        path = os.pathsep.join([str(common.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        lines = {"started": "running on http", "warm": "warmed up"}
        return cls([*words, "--port", "0", *given], lines, PYTHONPATH=path, **more)

    def _listen(self) -> None:
        for line in self.process.stderr or ():
            self._said.append(line)
            for name, words in self._lines.items():
                if words in line:
                    self.seconds[name] = time.perf_counter() - self._begun
            if self._lines.keys() == self.seconds.keys():
                self._warm.set()
        self._warm.set()

    def address(self, once: str = "warm") -> str:
        """Its address, once it is warm, or answers: ``started``."""
        ends = time.monotonic() + 600
        while once not in self.seconds and self.process.poll() is None and time.monotonic() < ends:
            self._warm.wait(0.05)
        found = re.search(r"(?:running|listening) on (http://\S+)", "".join(self._said))
        if found is None or once not in self.seconds:
            raise SystemExit(f"the server did not start, or is not warm: {self.said()}")
        return f"{found[1]}/v1"

    def said(self) -> str:
        """The end of what it wrote."""
        return "".join(self._said)[-6000:]

    def end(self) -> None:
        """Have it end, and wait for that."""
        self.process.terminate()
        self.process.wait(60)


def asked(client: Any, model: str, number: int, most: int, *, is_ours: bool) -> dict[str, float]:
    """One streamed answer: seconds to its first token and to its end, its tokens, and those of its prompt."""
    begun, first, used = time.perf_counter(), 0.0, None
    question = QUESTIONS[number % len(QUESTIONS)]
    messages = [{"role": "user", "content": question if is_ours else llama_server.prompt(question)}]
    length = max(most * (1 + number % 4) // 4, 1)
    options = {"model": model, "messages": messages, "temperature": 0, "max_tokens": length}
    if not is_ours:
        options["extra_body"] = llama_server.REQUEST
    for part in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options):
        if not first and part.choices and part.choices[0].delta.content:
            first = time.perf_counter() - begun
        used = part.usage or used
    found = {"first": first, "all": time.perf_counter() - begun, "tokens": used.completion_tokens if used else 0}
    return found | {"read": used.prompt_tokens if used else 0}


def load(client: Any, names: list[str], clients: int, each: int, most: int, *, is_ours: bool) -> dict[str, Any]:
    """What so many clients get that send so many requests each."""

    def one(index: int) -> list[dict[str, float]]:
        name = names[index % len(names)]
        return [asked(client, name, index + clients * turn, most, is_ours=is_ours) for turn in range(each)]

    begun = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = [answer for found in pool.map(one, range(clients)) for answer in found]
    seconds, tokens = time.perf_counter() - begun, sum(answer["tokens"] for answer in answers)
    firsts = [1000 * answer["first"] for answer in answers if answer["first"]]
    found = {"clients": clients, "requests": len(answers), "tokens": tokens, "tokens_s": tokens / seconds}
    found["prompt_tokens"] = sum(answer["read"] for answer in answers)
    return found | {"first_ms": common.spread(firsts), "ms_token": 1000 * seconds / max(tokens, 1)}


def starts(checkpoint: Path, adapter: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What the first texts of three starts after each other take."""
    import openai

    words = ["--context", str(options.context), "--parallel", str(options.parallel[0])]
    with common.temporary("kernels-", None) as kernels:
        for kind, once in (("no kernels on disk", "warm"), ("kernels on disk", "warm"), ("at once", "started")):
            server = Serving.ours(checkpoint, adapter, words, GEMMA4_COMPAT_CACHE=str(kernels))
            try:
                client = openai.OpenAI(base_url=server.address(once), api_key="none", max_retries=0, timeout=120)
                name = client.models.list().data[0].id
                texts = [asked(client, name, 3, options.answer, is_ours=True) for _ in range(4)]
                server.address()
            finally:
                server.end()
            yield {"start": kind, "seconds": server.seconds, "texts": texts}
            shown = ", ".join(f"{text['all']:.2f}" for text in texts)
            when = " and ".join(f"{name} after {seconds:.0f} s" for name, seconds in server.seconds.items())
            print(f"{kind}: {when}; {texts[0]['tokens']} tokens in {shown} s", flush=True)


def memory(process: int) -> dict[str, float | None]:
    """MiB of a process, in the host and on GPUs."""
    import psutil

    found: dict[str, float | None] = {
        "host_mib": psutil.Process(process).memory_info().rss / (1 << 20),
        "gpu_mib": None,
    }
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        query += [f"--id={ids}"] if (ids := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
        found["gpu_mib"] = sum(map(float, subprocess.run(query, capture_output=True, check=True).stdout.split()))
    return found


def bare(checkpoint: Path, adapter: Path, context: int, most: int) -> dict[str, Any]:
    """One `generate` after the other in this process: milliseconds a token, without a streamer."""
    import torch

    from gemma4_compat.cli.serving import answers, loading, media, requests

    wanted = loading.Wanted(str(checkpoint), [f"adapted={adapter}"], plan={"context": context})
    served = loading.load(wanted, str(checkpoint.parent))
    preparation = answers.Preparation(served, media.Limits())
    said = [{"role": "user", "content": QUESTIONS[1]}]
    asked = {"messages": said, "temperature": 0, "max_tokens": most}
    prompt = preparation.prompt(requests.read(json.dumps(asked).encode()))
    inputs = {name: value.to(served.base.device) for name, value in prompt.inputs.items()}
    times: list[float] = []
    for _ in range(6):
        begun = time.perf_counter()
        with torch.no_grad(), served.model.disable_adapter():
            tokens = served.model.generate(**inputs, generation_config=prompt.config)
        times.append(1000 * (time.perf_counter() - begun) / (tokens.shape[1] - prompt.tokens))
    return {
        "ms_token": statistics.median(times[2:]),
        "first_ms_token": times[0],
        "tokens": tokens.shape[1] - prompt.tokens,
    }


def beside(checkpoint: Path, adapter: Path, options: argparse.Namespace) -> Any:
    """:func:`bare` in a process of its own, or why it ended."""
    words = [sys.executable, __file__, "--bare", str(checkpoint), str(adapter)]
    words += ["--context", str(options.context), "--answer", str(options.answer)]
    done = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ, HF_HUB_OFFLINE="1"))
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-500:]


def measured(servers: list[tuple[str, int | None, dict[str, Any]]], options: argparse.Namespace, save: Any) -> None:
    """Loads of several servers in turns, then the memory of ours.

    Args:
        servers: the address of each, its process if this started it, and where results go.
        options: of the command.
        save: called after each result.
    """
    import openai

    def show(found: dict[str, Any], kind: str, new: dict[str, Any]) -> None:
        found.setdefault(kind, []).append(new)
        names = {name: found.get(name) for name in ("server", "parallel", "sampling")}
        print(json.dumps(common.rounded({**names, **new})), flush=True)
        save()

    known = []
    for address, process, found in servers:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=600)
        known.append((client, [model.id for model in client.models.list()], process, found))
    for clients in CLIENTS:
        for turn in range(options.rounds + 1):
            for server in [*known]:
                client, names, _, found = server
                each = max(options.each, 4 // clients) if turn else 1  # answers of all lengths
                try:
                    new = load(client, names[:1], clients, each, options.answer, is_ours="server" not in found)
                except openai.OpenAIError as error:
                    if "server" not in found:
                        raise
                    found["error"] = repr(error)
                    known.remove(server)
                else:
                    if turn:
                        show(found, "loads", new)
    for client, names, process, found in known:
        done = 0
        for share in (options.requests // 10, options.requests) if process and "server" not in found else ():
            each = max((share - done) // 4, 1)
            load(client, names, 4, each, min(options.answer, _SHORT), is_ours=True)
            done = share
            show(found, "memory", {"requests": share, **memory(process)})


def problems(servers: list[dict[str, Any]]) -> list[str]:
    """Servers that failed, and loads in which servers read or wrote different numbers of tokens."""
    found = [f"{one['server']}, {one['parallel']} at a time: {one['error']}" for one in servers if "error" in one]
    for clients in CLIENTS:
        for kind in ("prompt_tokens", "tokens"):
            of_all = [load[kind] for one in servers for load in one.get("loads", ()) if load["clients"] == clients]
            if of_all and min(of_all) < 0.95 * max(of_all):
                found.append(f"{clients} clients: {kind} from {min(of_all)} to {max(of_all)}")
    return found


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", choices=sorted(models.SHAPES), help="random weights; default: the trained tiny model")
    made.add_argument("--address", help="of another server that runs, in place of ours")
    made.add_argument("--context", type=int, default=1024, help="tokens (default: 1024)")
    made.add_argument("--answer", type=int, default=256, help="tokens of the longest answers (default: 256)")
    made.add_argument("--each", type=int, default=2, help="requests of each client in a round (default: 2)")
    made.add_argument("--rounds", type=int, default=3, help="of each load, servers in turns (default: 3)")
    made.add_argument(
        "--parallel", type=int, nargs="+", default=[1], help="answers at a time, of a server each (default: 1)"
    )
    made.add_argument("--llama-cpp", type=Path, help="llama.cpp's tree, built, with heads of this shape's files")
    made.add_argument("--requests", type=int, default=500, help="after which memory is read (default: 500)")
    made.add_argument("--starts", action="store_true", help="measure starts in place of loads")
    made.add_argument("--no-bare", action="store_true", help="servers only")
    made.add_argument("--bare", nargs=2, type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    made.add_argument("--out", type=Path, help="a file for the results, in JSON")
    return made


def main() -> int:
    options = parser().parse_args()
    if options.bare:
        print(json.dumps(bare(*options.bare, options.context, options.answer)))
        return 0
    if options.llama_cpp and (options.shape is None or options.address):
        parser().error("--llama-cpp needs --shape, and servers of ours")
    given = [word for word in sys.argv[1:] if word not in ("--out", str(options.out))]
    given = ["TREE" if word == str(options.llama_cpp) else word for word in given]
    result = common.header(Path(__file__), sys.modules[__name__], options.shape or "trained", given) | {"servers": []}

    def save() -> None:
        common.write(result, options.out)

    with contextlib.ExitStack() as stack:
        if options.address:
            result["servers"] = [{}]
            measured([(options.address, None, result["servers"][0])], options, save)
        else:
            trained = Trained.find() if options.shape is None else None
            if trained is not None:
                checkpoint, adapter = trained.checkpoint, trained.adapter
            else:
                folder = stack.enter_context(common.temporary("serving-", models.work_folder(options.shape)))
                built = models.build(options.shape, folder)
                result |= {"machine": built.pop("machine"), "built": built}
                checkpoint, adapter = folder / "checkpoint", folder / "adapter"
                write_tokenizer(checkpoint)
            if options.starts:
                result["starts"] = []
                for start in starts(checkpoint, adapter, options):
                    result["starts"].append(start)
                    save()
                return common.ended(result)
            if not options.no_bare:
                result["bare"] = beside(checkpoint, adapter, options)
                print(json.dumps(result["bare"]), flush=True)
                save()
            started: list[Serving] = []

            def begin(server: Serving, of_server: dict[str, Any]) -> None:
                started.append(server)
                stack.callback(server.end)
                result["servers"].append(of_server | {"seconds": server.seconds})

            try:
                for parallel in options.parallel:
                    words = ["--context", str(options.context), "--parallel", str(parallel)]
                    begin(Serving.ours(checkpoint, adapter, words), {"parallel": parallel})
                servers = [(one.address(), one.process.pid, into) for one, into in zip(started, result["servers"])]
                if options.llama_cpp:  # when ours have taken what they need
                    tree, on_gpu = options.llama_cpp.resolve(), result["machine"]["device"] != "CPU"
                    result["llama_cpp"] = llama_server.version(tree)
                    file = heads.filled(heads.named(tree, options.shape, "q4_0"), folder)
                    for parallel, sampling in itertools.product(options.parallel, llama_server.SAMPLINGS):
                        of_server = {"server": "llama.cpp", "parallel": parallel, "sampling": sampling}
                        words = llama_server.words(tree, file, of_server, options.context, on_gpu=on_gpu)
                        environment = {"LD_LIBRARY_PATH": llama.libraries(tree)}
                        begin(Serving(words, {"warm": "listening on http"}, **environment), of_server)
                        into = result["servers"][-1]
                        try:
                            servers.append((started[-1].address(), started[-1].process.pid, into))
                        except SystemExit:
                            into["error"] = "it did not start"
                measured(servers, options, save)
                for server in (one for one, into in zip(started, result["servers"]) if "error" in into):
                    print(server.said(), file=sys.stderr)
            except Exception as error:
                said = [one.said() for one in started]
                raise SystemExit(f"{error!r}; servers said: {said}") from error
        result["problems"] += problems(result["servers"])
        save()
    return common.ended(result)


if __name__ == "__main__":
    raise SystemExit(main())
