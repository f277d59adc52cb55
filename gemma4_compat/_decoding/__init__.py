"""Fast decoding: ``generate`` replays steps of one token, and after ``decode_fast`` prompts, as CUDA graphs.

Called by ``patches/generation/transformers_graph_decoding.py``; ``decode_fast`` only marks a model. The
patched ``generate`` asks whether to compile (``_valid_auto_compile_criteria``) and gets a :class:`call.Decoder`
from ``get_compiled_call``. Each token calls that decoder; it captures, replays, or runs the model itself.
``transformers_deferred_stop`` calls :mod:`deferral`; where no user's code runs between two tokens, also
:mod:`advancing` and :mod:`choosing`.

* :mod:`call`: the call that ``generate`` takes for its prompt and its steps.
* :mod:`decoder`: what a model keeps: its graphs, in :mod:`graphs`, and their statistics. :mod:`prompts`: the graphs of
  prompts. :mod:`embedded`: those with images or sounds. :mod:`pieces`: prompts of any length by graphs of a few sizes.
  :mod:`chunks`: prompts that do not fit.
* :mod:`steps`: one step and its inputs, and which other steps the same graph serves.
* :mod:`recording`: one captured step, on CUDA.
* :mod:`dependencies`: what a captured step has read that a replay would not notice. ``Decoding.variant`` checks it
  before every step (``hold``); if something differs, the graph is captured again.
* :mod:`snapshots`: what it compares. :mod:`recaptures`: the causes, as ``statistics`` counts them.
* :mod:`own`: kernels with an arithmetic of their own, in place of PyTorch's, unless ``decode_fast(exact=True)`` or no
  ``decode_fast`` asked for PyTorch's bits. :mod:`attention` (its CUDA C: :mod:`attention_source`, with matrix units
  :mod:`attention_tensor_source`); :mod:`matrix_products`: 4-bit weights (CUDA C: :mod:`matrix_source`); :mod:`dense`:
  weights that are not quantized. :mod:`reading`: attention of prompts, by :mod:`flash` (CUDA C: :mod:`flash_source`).
* :mod:`fused_steps`: captures a step again with fewer kernels and keeps that if the bits are the same. Its parts are
  :mod:`fusing` (defers operations), :mod:`pointwise` (what they compute), :mod:`kernel_source` (their CUDA C),
  :mod:`short_products` (what of LoRA's B is read early), :mod:`kernels` (tries and launches them) and :mod:`bits`
  (equality).
* With the bits of the original: :mod:`products` (4-bit weights; CUDA C: :mod:`product_source`), :mod:`reductions` (the
  means of norms; CUDA C of a whole row: :mod:`row_source`), :mod:`expert_rows` (4-bit weights of the experts that a
  token is routed to). :mod:`several`: what kernels of several weights share.
* :mod:`dequantizing`: whole 4-bit weights, for prompts and training (CUDA C: :mod:`dequantizing_source`); the patch
  ``bitsandbytes_fused_dequantization`` calls it.
* :mod:`compiling`: NVRTC. :mod:`kernel_files`: what it compiled, on disk. :mod:`launching`: CUDA's driver.
* :mod:`static_caches`: the tensors of a static cache, whose addresses graphs hold. :mod:`new_caches` makes one and
  :mod:`initializing` fills it without upstream's Python. :mod:`shifting` moves the rows of a full one.
* :mod:`deferral`: when the host waits for a token. :mod:`advancing`: the inputs of a step, made from the last one's.
  :mod:`choosing`: transformers' processors and criteria, called faster. :mod:`top_tokens`: top-k and top-p.
* :mod:`assisted`: texts with an assistant model or prompt lookup. :mod:`drafted_calls`: which of them. :mod:`rounds`:
  drafts, and the forward that reads them. :mod:`draft_windows`: where its sliding layers keep their rows. :mod:`pace`:
  how many drafts. :mod:`lookup`: drafts from the text itself. :mod:`noise`: what tokens are drawn with. :mod:`ends`:
  where the text ends.
* :mod:`overflow`: prompts whose logits are not numbers in float16; ``transformers_fp16_logits`` says so.
* :mod:`obstacles`: why a model cannot be captured.
"""

from __future__ import annotations

from gemma4_compat._decoding.decoder import decoding_statistics as decoding_statistics
