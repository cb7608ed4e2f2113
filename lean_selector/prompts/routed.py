"""What is known of a request's prompt when a worker is chosen for it."""

from lean_selector.core.selection.prompt import Prompt
from lean_selector.prompts.answers import AnswerReader


class Routed:
    """One request, ready to be routed.

    `why_not` says in words why blocks of the prompt are unknown; None where they are known.
    `exact`: the blocks are those of the whole prompt; otherwise they are those of its beginning
    (none, where load alone decides), and `prompt.isl_tokens` is an estimate.
    """

    __slots__ = (
        "answer",
        "body",
        "exact",
        "model_name",
        "prompt",
        "streams",
        "tenant_id",
        "why_not",
        "worker_ids",
    )

    def __init__(
        self,
        model_name: str,
        tenant_id: str,
        prompt: Prompt,
        body: bytes,
        *,
        exact: bool,
        why_not: str | None,
        streams: bool,
        worker_ids: frozenset[int] | None = None,
        answer: AnswerReader | None = None,
    ) -> None:
        self.model_name = model_name  # as it is registered: the base model of an adapter
        self.tenant_id = tenant_id
        self.prompt = prompt  # isl_tokens >= 1
        self.body = body  # to be forwarded
        self.exact = exact
        self.why_not = why_not
        self.streams = streams
        self.worker_ids = worker_ids  # only these have the adapter; None: any
        self.answer = answer  # reads the answer; None: it passes untouched
