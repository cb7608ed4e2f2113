"""What is known of a request's prompt when a worker is chosen for it."""

from lean_selector.core.selection.prompt import Prompt
from lean_selector.prompts.answers import AnswerReader
from lean_selector.prompts.unknown import Unknown


class Routed:
    """One request, ready to be routed.

    Where `why_not` is None the blocks are those of the whole prompt. Otherwise it says why they are
    not: they are those of its beginning (none, where load alone decides), and `prompt.isl_tokens`
    is an estimate; or its salt is not in them.
    """

    __slots__ = (
        "answer",
        "body",
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
        why_not: Unknown | None,
        streams: bool,
        worker_ids: frozenset[int] | None = None,
        answer: AnswerReader | None = None,
    ) -> None:
        self.model_name = model_name  # as it is registered: the base model of an adapter
        self.tenant_id = tenant_id
        self.prompt = prompt  # isl_tokens >= 1
        self.body = body  # to be forwarded
        self.why_not = why_not
        self.streams = streams
        self.worker_ids = worker_ids  # only these have the adapter; None: any
        self.answer = answer  # reads the answer; None: it passes untouched
