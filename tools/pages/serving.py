"""The table of servers in docs/SERVING.md, from the newest committed run of benchmarks/serving/serving.py."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.serving.serving import CLIENTS
from tools.claims.form import result

#: What a row is called, by where llama.cpp chooses tokens; None: a server of ours.
_NAMES = {
    None: "`gemma4-compat serve`",
    "host": "llama.cpp's `llama-server`",
    "device": "`llama-server --backend-sampling`",
}
_LLAMA = (
    "llama.cpp has Q4_0 of other random weights in the same shape, flash attention, and everything on the GPU. It "
    "took turns with our servers in the same run, with prompts and texts of the same lengths. By default it chooses "
    "tokens on the host. `--backend-sampling --samplers temperature`, which it calls experimental, has the GPU find "
    "the likeliest."
)


def section() -> str:
    """A row for each server of the run."""
    return table(result("*-h200/serving-E2B.json"))


def table(run: dict[str, Any]) -> str:
    """Tokens a second and milliseconds to the first text by the number of clients, llama.cpp's if the run has them."""
    columns = [f"{clients} client{'s' * (clients > 1)}" for clients in CLIENTS]
    head = ["server", f"tokens a second, {columns[0]}", *columns[1:], f"first text, {columns[0]}", *columns[1:]]
    rows = [f"| {' | '.join(head)} |", f"|---|{2 * len(CLIENTS) * '---:|'}"]
    servers = [server for server in run["servers"] if "error" not in server]
    for server in sorted(servers, key=lambda server: [*_NAMES].index(server.get("sampling"))):
        loads = [[load for load in server["loads"] if load["clients"] == clients] for clients in CLIENTS]
        speeds = [f"{statistics.mean(load['tokens_s'] for load in each):,.0f}" for each in loads]
        firsts = [f"{statistics.mean(load['first_ms']['median'] for load in each):,.0f} ms" for each in loads]
        name = f"{_NAMES[server.get('sampling')]}, `--parallel {server['parallel']}`"
        rows.append(f"| {' | '.join([name, *speeds, *firsts])} |")
    if "llama_cpp" in run:
        rows += ["", _LLAMA]
    return "\n".join(rows)
