"""Sampling with an assistant model follows the distribution of sampling without one.

Symptom: silent: with ``do_sample=True`` and a Gemma 4 assistant, the likeliest tokens come out too often (a token of
probability 0.4 in 85 of 100 places), or tokens that the assistant likes come out too seldom. ``temperature``,
``top_k``, ``top_p`` and other processors do not reach the assistant.

Cause: ``SinglePositionMultiTokenCandidateGenerator.get_candidates`` drafts the assistant's likeliest token and hands
its raw logits on. ``_speculative_sampling`` accepts a draft with probability ``p / q``, the model's over the
assistant's. That gives the model's distribution only if the draft was drawn from the logits handed on.

Fix: With ``do_sample=True`` a draft is drawn from the assistant's logits after the processors of the call, and these
processed logits are passed on. Greedy decoding is unchanged. To treat the likeliest token as the only possible one
would be exact as well, but fewer drafts of a good assistant would be accepted: those of a perfect one with the
probability of the likeliest token instead of always.

Remove when: ``SinglePositionMultiTokenCandidateGenerator`` draws its candidates from the distribution it hands on.
"""

from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.runtime.proxies import Proxy
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F85", severity="wrong_result", affected=">=5.8.0")


class Drafter(Proxy):
    """The assistant model for one ``generate``, whose likeliest token is one drawn from its processed logits."""

    def __init__(self, model: Any, processors: list[Callable[[Any, Any], Any]]) -> None:
        super().__init__(model)
        self._self_processors = processors
        self._self_tokens: Any = None
        self._self_scores: list[Any] = []

    def begin(self, tokens: Any) -> None:
        """``tokens``: the text so far, int64 of shape (1, length)."""
        self._self_tokens, self._self_scores = tokens, []

    def scores(self) -> Any:
        """What the tokens since :meth:`begin` were drawn from: float32 logits, (1, tokens, vocabulary)."""
        import torch

        return torch.stack(self._self_scores, dim=1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; the largest of their logits is that of the token drawn."""
        import torch

        outputs = self.__wrapped__(*args, **kwargs)
        # A copy, because processors may write into their argument.
        scores = outputs.logits[:, -1].to(self._self_tokens.device, torch.float32, copy=True)
        for processor in self._self_processors:
            scores = processor(self._self_tokens, scores)
        token = torch.multinomial(scores.softmax(dim=-1), num_samples=1)
        self._self_scores.append(scores)
        self._self_tokens = torch.cat([self._self_tokens, token], dim=-1)
        chosen = token.unsqueeze(1).to(outputs.logits.device)
        outputs.logits = torch.zeros_like(outputs.logits).scatter_(-1, chosen, 1)
        return outputs


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._get_candidate_generator")
def candidate_generator(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.generation import candidate_generator as upstream

    generator = original(self, *args, **kwargs)
    sampling = isinstance(generator, upstream.SinglePositionMultiTokenCandidateGenerator)
    if sampling and generator.generation_config.do_sample:
        processors = kwargs.get("logits_processor") or []
        generator.assistant_model = Drafter(generator.assistant_model, [it for it in processors if _is_pure(it)])
    return generator


def _is_pure(processor: Any) -> bool:
    """Guidance runs the whole model once more for each token it is asked about, and remembers the token."""
    from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor

    return not isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


@PATCH.replaces(
    "transformers.generation.candidate_generator", "SinglePositionMultiTokenCandidateGenerator.get_candidates"
)
def get_candidates(
    original: Callable[..., tuple[Any, Any]], self: Any, input_ids: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    drafter = self.assistant_model
    if not isinstance(drafter, Drafter):
        return original(self, input_ids, *args, **kwargs)
    drafter.begin(input_ids)
    candidates, logits = original(self, input_ids, *args, **kwargs)
    return candidates, logits if logits is None else drafter.scores()


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import assistants

    return assistants.sampled(workspace)
