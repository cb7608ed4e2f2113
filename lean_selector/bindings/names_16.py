"""One service, two dialects: requests that both read alike, and answers in the words of 1.6.

What a service of the 1.3 dialect calls otherwise is renamed, what it does not say is worked out
where the request tells it (spec selection_16.md 1, 4). An answer in 1.6 stays as it is.
"""

import msgspec

from lean_selector.bindings.forms import Fields
from lean_selector.wire.prompt import binary_form, prompt_to_select
from lean_selector.wire.prompt_fields import PromptFields
from lean_selector.wire.scalars import unpack_signed

_NEWER = {"tenant_id": "routing_group", "reservation_id": "selection_id"}
_PROMPT: type[PromptFields] = binary_form(PromptFields)


def for_both(fields: Fields) -> Fields:
    """The same body under both names of each field."""
    sent = dict(fields)
    if "routing_group" in sent:
        sent.setdefault("tenant_id", sent["routing_group"])
    elif "tenant_id" in sent:
        sent["routing_group"] = sent["tenant_id"]
    sent.pop("reservation_id", None)  # which 1.6 ignores
    if sent.get("selection_id") is not None:
        sent["reservation_id"] = sent["selection_id"]
    return sent


def renamed(answer: Fields) -> Fields:
    """A selection, reservation, load or record."""
    return {_NEWER.get(name, name): value for name, value in answer.items()}


def scores(answer: Fields) -> Fields:
    for row in answer["workers"]:
        row.pop("router_credit_blocks", None)
    return answer


def selected_and_booked(answer: Fields, request: Fields, is_eagle: bool) -> Fields:
    """The answer to select_and_reserve, with the hashes that were booked."""
    answer = renamed(answer)
    if "sequence_hashes" in answer:
        return answer
    fields = msgspec.convert(request, _PROMPT)
    prompt = prompt_to_select(fields, answer["block_size"], is_eagle)
    return {
        "selection_id": answer.pop("selection_id"),
        "sequence_hashes": list(unpack_signed(prompt.sequence_hashes())),
        "isl_tokens": prompt.isl_tokens,
        **answer,
    }
